"""The twin of `mpframe autopsy`: python scripts/autopsy.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("autopsy")
