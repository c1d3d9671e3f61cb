"""Compares runs: one HTML page that needs no network, and the same tables as Markdown.

    records      reads a run's folder: options, summary, curves, pictures
    groups       runs that differ only in the seed, and their comparison with fp32
    tables       the tables as plain text; curves: the curves as one picture
    page         the report as HTML; markdown: as Markdown
    sweep_table  the table at the end of a sweep

Begin with records.py, then groups.py. A run's folder may come from a stranger: its names and texts
are escaped wherever they are shown, and no code in it is run.

Imports `tracking`, `config` and `files`.
"""
