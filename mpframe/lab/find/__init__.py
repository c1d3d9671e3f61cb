"""Options that are measured in place of a training: `trainer.find=lr` or `batch_size`.

    lr            a range test of the learning rate, drawn
    batch_size    the largest micro-batch that memory holds
    rollback      undoes what the measurement has trained

A run imports the file that it is asked for, and calls its `find`.
"""
