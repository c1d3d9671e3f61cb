"""How weights are stored: each in the format of the ops that read it.

    reads         which ops read each weight, seen in one forward pass
    storage       the format of each weight, and how it gets it
    fp32_share    which share of the weights stays in fp32, and why

Begin with storage.py; `Precision.prepare` in precision.py calls it.
"""
