"""Matrix products and convolutions in formats below 16 bits: fp8, fp6, fp4, MX and NVFP4.

formats.py    an element format, and the rounding of values to it
scaling.py    a tensor in a format: which values share a scale, and what the scale is
"""
