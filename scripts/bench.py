"""The twin of `mpframe bench`: python scripts/bench.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("bench")
