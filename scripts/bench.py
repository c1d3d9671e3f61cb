"""Measure: python scripts/bench.py [GROUP ...] [--repeats N] [--out FOLDER]

python scripts/bench.py                      all groups: tiny, resnet18, ranges, startup, cuda
python scripts/bench.py tiny --repeats 20
"""

import os

if __name__ == "__main__":
    # Before torch is loaded. Threads that wait by spinning fight whatever else the machine runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from mpframe.bench.program import main

    main()
