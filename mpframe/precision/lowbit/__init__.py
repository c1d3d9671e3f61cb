"""Matrix products and convolutions in formats below 16 bits: fp8, fp6, fp4, MX and NVFP4.

A product quantises both operands along the axis that is summed over, sums in fp32 and rounds once
to half. So do the instructions of a GPU. Emulation runs on any machine. Begin with recipe.py, which
says how each operand of each product is quantised.

    formats.py    an element format, and the rounding of values to it
    scaling.py    a tensor in a format: which values share a scale, the scale, and what is lost
    handler.py    the `OpHandler` through which the cast and the dtype map find all this
    native.py     matrix products by the instructions of a device, where it has them
    kernels.py    the products: matrix product and convolution, with their gradients
    ops.py        which ops of PyTorch are which product

The shipped recipes are `conf/dtype/products/*.yaml`.
"""
