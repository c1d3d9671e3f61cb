"""The benchmarks: python scripts/bench.py --help"""

from bench.program import main

if __name__ == "__main__":
    main()
