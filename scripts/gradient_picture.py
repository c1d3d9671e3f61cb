"""Show what a half format loses of a run's gradients: as they are, scaled as the run scales, best.

python scripts/gradient_picture.py run=runs/2026-11-21/05-45-42
python scripts/gradient_picture.py run=runs/mine dtype.half=bfloat16 out=gradients.png
"""

from mpframe.cli.gradient_picture import main

if __name__ == "__main__":
    main()
