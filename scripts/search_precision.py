"""The twin of `mpframe search`: python scripts/search_precision.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("search")
