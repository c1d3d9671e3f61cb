"""Masters: the fp32 tensors behind half weights, and the watch over these weights.

    master            one of them: made once for a weight, and shared by all optimizers over it
    split_master      one that is kept as the bits that a bfloat16 weight lacks
    write_detector    whether a weight was written behind its master's back
    widening          half weights that go back to fp32, because other code writes them
    masters           those of all parameters of an optimizer

Begin with master.py. The step that updates them is master_weights.py, a floor above.
"""
