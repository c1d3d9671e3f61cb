"""Export: a checkpoint's weights in a file that anybody can use without mpframe.

    rounding.py   the weights in one format, rounded once from the fp32 masters
    graph.py      the model with them as one graph: torch.export's, and ONNX
    sidecar.py    what a stranger must know, as JSON
    files.py      the files' formats; writes a file and its sidecar

Begin with sidecar.py. `cli/export.py` is the program.
"""
