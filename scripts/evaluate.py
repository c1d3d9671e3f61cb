"""The twin of `mpframe evaluate`: python scripts/evaluate.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("evaluate")
