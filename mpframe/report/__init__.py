"""Runs side by side: one HTML page that needs no network, and the same tables as Markdown.

    records    a run's folder, read: options, summary, curves, pictures
    groups     runs that differ in the seed alone, and how they compare with fp32
    curves     loss, scale and skipped steps of all runs, drawn
    page       HTML;  markdown: Markdown

A run's folder may come from anybody: its names and texts are escaped wherever they are shown, and
nothing of it is run.
"""

from mpframe.report.groups import Group, compared
from mpframe.report.markdown import as_markdown
from mpframe.report.page import as_page
from mpframe.report.records import Record, find_runs

__all__ = ["Group", "Record", "as_markdown", "as_page", "compared", "find_runs"]
