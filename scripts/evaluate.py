"""Evaluate a checkpoint: its validation loss and metric, bit for bit as the run measured them.

python scripts/evaluate.py checkpoint=runs/2026-11-21/05-45-42
python scripts/evaluate.py checkpoint=runs/mine/checkpoints/step_00000440 weights=trained
python scripts/evaluate.py checkpoint=runs/mine dataset.root=/elsewhere device=cpu out=numbers.json

The options are the run's own; a class that is not mpframe's must be named again, as in
model._target_=my_pkg.Net: nothing is called because a stored file says so.
"""

from mpframe.cli.evaluate import main

if __name__ == "__main__":
    main()
