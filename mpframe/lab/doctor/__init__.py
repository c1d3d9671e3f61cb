"""Tells before training what will go wrong, and which option corrects it.

    subject    a trainer built as for training, its data, and trials on them
    checks     each examines a `Subject` and returns findings; hints.py has the checks of every run

Nothing is written, and each trial is undone. Begin with subject.py.
"""
