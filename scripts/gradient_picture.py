"""The twin of `mpframe gradient_picture`: python scripts/gradient_picture.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("gradient_picture")
