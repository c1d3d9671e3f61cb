"""The twin of `mpframe doctor`: python scripts/doctor.py --help"""

from mpframe.cli.main import start

if __name__ == "__main__":
    start("doctor")
