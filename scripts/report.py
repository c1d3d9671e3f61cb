"""Compare runs on one page that opens without a network:

    python scripts/report.py runs/2026-11-21/05-45-42            a sweep, or one run
    python scripts/report.py runs/first runs/second out=compared

Writes report.html and report.md into the first folder, beside it where it is a run, or into
out=FOLDER.
"""

from mpframe.cli.report import main

if __name__ == "__main__":
    main()
