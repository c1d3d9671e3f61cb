"""Why a step failed: it is run again in several formats, and one verdict is given.

python scripts/autopsy.py run=runs/2026-11-21/05-45-42
python scripts/autopsy.py run=runs/mine step=12 device=cpu
python scripts/autopsy.py run=runs/mine/checkpoints/step_00000440

Looks into the last step whose evidence the run saved; of a run without any, or of a checkpoint,
into the step that comes next.
"""

from mpframe.cli.autopsy import main

if __name__ == "__main__":
    main()
