"""Replay a run's gradients through loss scalers:

    python scripts/simulate_scaling.py run=runs/2026-11-21/05-45-42
    python scripts/simulate_scaling.py run=FOLDER_OR_FILE loss_scaling=LogMax,Backoff

Takes the options of the scalers as training does: loss_scaling=LogMax loss_scaling.mean_decay=0.9
"""

from mpframe.cli.simulate import simulate

if __name__ == "__main__":
    simulate()
