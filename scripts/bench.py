"""Measure: python scripts/bench.py [GROUP ...] [--repeats N] [--out FOLDER]

python scripts/bench.py                      all groups: tiny, resnet18, startup, cuda
python scripts/bench.py tiny --repeats 20
"""

from mpframe.bench.program import main

if __name__ == "__main__":
    main()
