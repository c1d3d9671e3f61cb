"""From the gradients of a backward pass to the weights, in fp32 and all or nothing.

gradients measures, widens and unscales. masters keeps the fp32 value behind each half weight, and
widening turns weights back to fp32 that other code writes. optimizer is the torch optimizer over
the masters, and master_weights its step.
"""
