"""What a run writes down: curves, tables, its summary and where it happened.

Begin with tracker.py, which writes TensorBoard's event file, and summary.py.

    tracker, event_file    curves, texts, pictures and hyperparameters for TensorBoard
    tags                   the name of every curve, picture and text, and what it means
    metrics_csv            the same numbers as a table
    amax_record            the largest gradient of every step, to try loss scalers on afterwards
    summary                summary.json: how a run ended
    environment, memory    versions, hardware, command line; the most memory in use

May import config, files and errors; knows no trainer. Nothing is exported here, because
summary.py is imported by programs that do not need torch.
"""
