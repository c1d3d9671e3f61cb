"""The twin of `mpframe report`: python scripts/report.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("report")
