"""How weights are stored: each in the format of the ops that read it.

    storage       the format of each weight, and how it gets it
    reads         a traced step: which ops read each weight, seen in one forward pass

`Precision.prepare` and `Precision.trace` call them.
"""
