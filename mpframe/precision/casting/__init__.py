"""The policy applied to each op while it runs.

Begin with cast.py: a function mode that is shown every call and runs it by a handler. plans.py has
the handlers, one for each rule of the lists; blocks.py opens and nests blocks. Three files cover
what a call does not show: unwrapping.py goes into Python functions of torch, recomputation.py casts
a checkpointed forward pass again as it was cast first, and emulation.py computes float16 on a CPU
as a tensor core does.
"""
