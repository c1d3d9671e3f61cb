"""The twin of `mpframe simulate`: python scripts/simulate_scaling.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("simulate")
