"""Compares runs: one HTML page that needs no network.

    records  reads a run's folder: options, summary, curves
    tables   runs that differ only in the seed, compared with fp32, as plain text
    page     the report as HTML, with its curves
    sweep    the table at the end of a sweep

Begin with records.py, then tables.py. A run's folder may come from a stranger: its names and texts
are escaped wherever they are shown, and no code in it is run.
"""
