"""Reads and writes files that may be shared, damaged, hostile, or on a full disk.

    durable.py      writes a file whole or not at all; appends whole pieces
    plain_file.py   opens regular files only: no links, FIFOs or devices
    stored_yaml.py  reads a run's stored options as plain values, within bounds
    file_lock.py    lets processes work in a folder one after the other
    text.py         lines and tables for a terminal; errors in one line

Begin with durable.py. This package imports only `core.errors`, so every package can use it.
"""
