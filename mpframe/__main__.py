"""`python -m mpframe COMMAND ...`."""

from mpframe.cli.main import main

if __name__ == "__main__":
    main()
