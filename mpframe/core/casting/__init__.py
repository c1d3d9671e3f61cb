"""Which format each op and each weight has, and how an op is run in it.

op_lists and policy decide. trace and storage choose what is stored in half. cast intercepts the ops
of a block, and handlers run them. emulation computes on a CPU as a tensor core does, and
torch_functions reaches the ops that torch hides inside other functions.
"""
