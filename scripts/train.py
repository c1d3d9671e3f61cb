"""The twin of `mpframe train`: python scripts/train.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("train")
