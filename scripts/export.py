"""The twin of `mpframe export`: python scripts/export.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("export")
