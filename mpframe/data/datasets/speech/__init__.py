"""Sequences of feature frames with the labels that are spoken in them."""
