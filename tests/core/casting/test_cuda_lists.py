"""The default lists beside torch's CUDA autocast, which fake tensors show without a GPU."""

import logging
import warnings
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from op_table import TABLE
from test_listed_ops import HOW, LISTS, inputs_as
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from vocabulary import formats, tensors

from mpframe import Precision

DEFAULT, FP16 = LISTS["default"], torch.float16
# Fake tensors have no format to compare here: integer results, or no fake kernel. The norms of
# vectors are as in CUDA autocast.
SAME = {"linalg_lstsq", "linalg_matrix_sqrth", "torchvision.nms"}
SAME |= {"linalg_norm", "linalg_vector_norm"}
# No half kernel on a CPU: fp32, on every device. So are coordinates, which it computes in half.
NO_HALF = "cholesky_inverse cholesky_solve complex histogramdd logdet lu lu_solve nanquantile ormqr"
NO_HALF += " pinverse polar quantile stft svd triangular_solve view_as_complex"
FAMILIES = ("fft_", "linalg_", "special_", "grid_sampler", "torchvision.")
# Given two formats autocast fails, and here the widest counts. It leaves `_grouped_mm` in the
# format of its inputs, and refuses `binary_cross_entropy`, which is unsafe in half.
OTHERS = "cartesian_prod isclose lerp masked_scatter meshgrid scatter scatter_reduce _grouped_mm"
OTHERS += " binary_cross_entropy"
INTENDED = {op for op in DEFAULT.deny if op.startswith(FAMILIES)} - SAME
INTENDED |= {*NO_HALF.split(), *OTHERS.split()}
NOT_FAKEABLE = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
OURS = Precision("amp")
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def cuda_autocast():
    """torch's CUDA autocast; `torch.autocast` would switch itself off without a GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", FP16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


def fake(leaf):
    return torch.empty_like(leaf, device="cuda") if isinstance(leaf, Tensor) else leaf


def outcome(spelling, inputs, block):
    with FAKE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = tree_map(fake, inputs)
        try:
            with block:
                return formats(spelling(*inputs))
        except (RuntimeError, NotImplementedError) as error:
            return type(error).__name__


@pytest.mark.slow
def test_the_default_lists_are_those_of_cuda_autocast(caplog) -> None:
    caplog.set_level(logging.CRITICAL, "torch._subclasses.fake_tensor")  # Errors take time.
    listed = (DEFAULT.allow | DEFAULT.deny | DEFAULT.infer) - NOT_FAKEABLE
    different = set()
    for op, how in product(listed, HOW):
        if how == "both" and sum(t.is_floating_point() for t in tensors(TABLE[op].inputs)) < 2:
            continue  # As fp32.
        call, inputs = TABLE[op].spellings[-1], inputs_as(TABLE[op], how, FP16)
        if outcome(call, inputs, OURS.cast()) != outcome(call, inputs, cuda_autocast()):
            different.add(op)
    assert different == INTENDED
