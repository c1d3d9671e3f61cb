"""The default lists beside torch's CUDA autocast: the same formats, but for the ops named here.

Fake tensors have a device and a format and no memory: torch's own CUDA autocast decides about them
on a machine without a GPU.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from op_table import TABLE, Spelling
from test_listed_ops import HOW, LISTS, inputs_as
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from vocabulary import formats

from mpframe import Precision

FP16, DEFAULT = torch.float16, LISTS["default"]
# Where the default lists differ from CUDA autocast. Everything else is the same.
NO_HALF_KERNEL = "no half kernel on a CPU: fp32, on every device"
TWO_FORMATS = "given two formats autocast fails; here the widest of them"
COORDINATES = "a CPU's kernel computes coordinates in half: fp32, on every device"
REGIONS = "autocast computes in fp32 too, but rounds the result to the format of the input"
SOME = "cholesky_inverse cholesky_solve complex histogramdd logdet lu lu_solve nanquantile ormqr"
SOME += " pinverse polar quantile stft svd triangular_solve view_as_complex"
# Fake tensors have no format to compare here: integer results, or no fake kernel.
SEEN_AS_SAME = {"linalg_lstsq", "linalg_matrix_sqrth", "torchvision.nms"}
NORMS = {"linalg_matrix_norm", "linalg_norm", "linalg_vector_norm"}


def denied(*families: str) -> set[str]:
    """The ops of `deny` in these families, in which nothing is as in CUDA autocast."""
    return {op for op in DEFAULT.deny if op.startswith(families)} - SEEN_AS_SAME - NORMS


INTENDED = {
    "_grouped_mm": "autocast leaves it in the format of its inputs; here it is a product like bmm",
    "binary_cross_entropy": "autocast refuses it, being unsafe in half; here it runs in fp32",
    "isclose": "given two formats autocast fails; here both in fp32",
    "linalg_matrix_norm": "autocast gives half matrices to the nuclear norm, which fails on them",
    **dict.fromkeys(
        ["cartesian_prod", "lerp", "masked_scatter", "meshgrid", "scatter"], TWO_FORMATS
    ),
    **dict.fromkeys(["scatter", "scatter_reduce"], TWO_FORMATS),
    **dict.fromkeys(denied("grid_sampler"), COORDINATES),
    **dict.fromkeys(denied("torchvision."), REGIONS),
    **dict.fromkeys(denied("fft_", "linalg_", "special_"), NO_HALF_KERNEL),
    **dict.fromkeys(SOME.split(), NO_HALF_KERNEL),
}
# Recurrent layers cannot be run on fake CUDA tensors.
NOT_FAKEABLE = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
OURS = Precision("amp")
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def cuda_autocast() -> Iterator[None]:
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


def on_fake_cuda(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def fake(leaf: Any) -> Any:
        return torch.empty_like(leaf, device="cuda") if isinstance(leaf, Tensor) else leaf

    return tree_map(fake, inputs)  # type: ignore[no-any-return]


def outcome(spelling: Spelling, inputs: tuple[Any, ...], block: Any) -> Any:
    """The formats of the result, or the kind of error."""
    with FAKE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = on_fake_cuda(inputs)
        try:
            with block:
                return formats(spelling(*inputs))
        except (RuntimeError, NotImplementedError) as error:
            return type(error).__name__


def differs(op: str) -> bool:
    """Whether ours and theirs differ for some formats of the inputs."""
    spelling = TABLE[op].spellings[-1]
    given = (inputs_as(TABLE[op], how, FP16) for how in HOW)
    return any(
        outcome(spelling, inputs, OURS.cast()) != outcome(spelling, inputs, cuda_autocast())
        for inputs in given
    )


def test_the_default_lists_are_those_of_cuda_autocast(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "torch._subclasses.fake_tensor")  # Errors take time.
    listed = DEFAULT.allow | DEFAULT.deny | DEFAULT.infer
    assert {op for op in listed - NOT_FAKEABLE if differs(op)} == INTENDED.keys()


def test_what_is_in_no_list_is_left_alone_by_both() -> None:
    """Ops that CUDA autocast does not touch: norms with statistics, means, roots, comparisons."""
    calls: list[Spelling] = [
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        lambda x: torch.nn.functional.instance_norm(x),
        lambda x: x.mean(),
        lambda x: x.var(),
        torch.sqrt,
        torch.erf,
        lambda x: x > 0.5,
        lambda x: torch.nn.functional.embedding(torch.tensor([0], device=x.device), x[0, 0]),
    ]
    for how, call in product((torch.float32, FP16), calls):
        inputs = (torch.rand(2, 4, 4, 4).to(how),)
        ours = outcome(call, inputs, OURS.cast())
        assert ours == outcome(call, inputs, cuda_autocast())
