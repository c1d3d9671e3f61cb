"""The twin of `mpframe predict`: python scripts/predict.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("predict")
