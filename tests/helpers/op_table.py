"""A row for every op of every shipped list: inputs, and the ways to write the op with them.

Floating inputs are written in fp32. A test runs them in the formats it is about.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

Spelling = Callable[..., Any]


class Row(NamedTuple):
    """An op as it can be called, each of `spellings` with the `inputs`."""

    inputs: tuple[Any, ...]
    spellings: Sequence[Spelling]


TABLE: dict[str, Row] = {}


def add(names: str, *inputs: Any, of: str = "", by: str = "", **options: Any) -> None:
    """Ops that are given the same: as functions, and as methods.

    of: the family of their names, as in `linalg_inv`. by: the names of the inputs, to give all by.
    """
    keys = by.split()
    for name in names.split():
        places = [getattr(torch, of)] if of else [F, torch, torch.special, Tensor]
        ways: list[Spelling] = [getattr(p, name) for p in places if hasattr(p, name)]
        if by:
            ways.append(lambda *xs, f=ways[0], **o: f(**dict(zip(keys, xs, strict=True)), **o))
        add_ways(f"{of}_{name}" if of else name, inputs, *(partial(way, **options) for way in ways))


def add_ways(op: str, inputs: tuple[Any, ...], *ways: Spelling) -> None:
    """An op with these inputs, written in these ways besides those that are there."""
    known = TABLE.get(op, Row(inputs, []))
    TABLE[op] = Row(inputs, [*known.spellings, *ways])


def real(function: Spelling) -> Spelling:
    """The op seen by its real part."""
    return lambda *inputs: function(*inputs).real.clone()


_generator = torch.Generator().manual_seed(5)


def values(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9: in the domain of every op here, with small products."""
    return torch.rand(*shape, generator=_generator) * 0.8 + 0.1


X, Y, Z, V, W, BIAS = *(values(4, 4) for _ in range(3)), values(4), values(4), values(3)
LINE, IMAGE, CUBE = values(2, 4, 8), values(2, 4, 6, 6), values(1, 2, 4, 4, 4)
KERNEL, GRID, HEADS = values(3, 4, 3, 3), values(2, 3, 3, 2), values(1, 2, 4, 4)
INDEX, CLASSES = torch.tensor([2, 0]), torch.tensor([1, 0, 3, 2])
SPREAD, EYE = CLASSES.expand(2, 4), torch.eye(4, dtype=torch.bool)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
POSITIVE = X @ X.T + 2 * torch.eye(4)  # positive definite
PIVOTS = torch.arange(1, 5, dtype=torch.int32)
# Matrix products and attention.
experts = values(4, 8), values(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
add_ways("_grouped_mm", experts, lambda x, w, ends: torch._grouped_mm(x, w, offs=ends))
add_ways("_grouped_mm", experts, lambda x, w, ends: F.grouped_mm(x, w, offs=ends))
batch = values(2, 4, 4)
add("addbmm", X, batch, batch)
add("addmm", X, Y, Z, by="input mat1 mat2")
add("addmv", V, X, W)
add("addr", X, V, W)
add("baddbmm", batch, batch, batch)
add("bmm", batch, batch)
add("chain_matmul pow cdist cosine_similarity dist pairwise_distance", X, Y)
add("allclose isclose heaviside inner", X, Y)
add("einsum", "ij,jk->ik", X, Y)
add_ways("einsum", ("ij,jk->ik", X, Y), lambda how, *xs: torch.einsum(how, list(xs)))
add("multi_dot", [X, Y, Z], of="linalg")
add("vecdot", X, Y, of="linalg", dim=0)
add("linear", X, values(4, 4), values(4), by="input weight bias")
add("matmul add atan2 div maximum minimum mul sub", X, Y, by="input other")
add_ways("matmul", (X, Y), lambda x, y: x @ y, lambda x, y: x.__rmatmul__(y), torch.linalg.matmul)
add("mm", X, Y, by="input mat2")
add("mv", X, V)
add("prelu", X, V[:1])
add("scaled_dot_product_attention", HEADS, HEADS, HEADS, by="query key value")
add("scaled_dot_product_attention", HEADS, HEADS, HEADS, is_causal=True)
add("conv1d", LINE, values(3, 4, 3), BIAS, by="input weight bias")
add("conv2d", IMAGE, KERNEL, BIAS, by="input weight bias")
add("conv3d", CUBE, values(3, 2, 3, 3, 3), BIAS, by="input weight bias")
add("conv_transpose1d", LINE, values(4, 3, 3), BIAS, by="input weight bias")
add("conv_transpose2d", IMAGE, values(4, 3, 3, 3), BIAS, by="input weight bias")
add("conv_transpose3d", CUBE, values(2, 3, 3, 3, 3), BIAS, by="input weight bias")
add("conv_tbc", values(8, 2, 4), values(3, 4, 3), BIAS)
add("convolution", IMAGE, KERNEL, BIAS, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
# Recurrent layers and cells, as `nn.LSTM` and its like call them.
for op, gates in (("gru", 3), ("lstm", 4), ("rnn_relu", 1), ("rnn_tanh", 1)):
    weights = [values(gates * 3, n) for n in (4, 3)] + [values(gates * 3) for _ in range(2)]
    h, c = values(2, 3), values(2, 3)
    state, states = ([h, c], [h[None], c[None]]) if op == "lstm" else (h, h[None])
    add(op, values(5, 2, 4), states, weights, True, 1, 0.0, False, False, False)
    add(f"{op}_cell", values(2, 4), state, *weights)
# Exponentials, powers, norms, reductions and distances.
unary = "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh square tan"
add(unary, X, by="input")
add_ways("acos", (X,), torch.arccos, Tensor.arccos)
add_ways("reciprocal", (X,), lambda x: 1 / x)
add("softplus", X, beta=2.0)
add_ways("pow", (X, Y), lambda x, y: x**2, lambda x, y: x**y, lambda x, y: 2**x)
add("softmax log_softmax cumprod cumsum logsumexp", X, dim=0)
add("group_norm", IMAGE, 2, V, W)
add("layer_norm", X, (4,), V, W)
add("native_layer_norm", X, (4,), V, W, 1e-5)
add("rms_norm", X, (4,), V)
add("local_response_norm", IMAGE, 2)
add("norm prod sum cumulative_trapezoid nuclear_norm pdist trapezoid", X)
add("frobenius_norm", X, dim=(0, 1))
add("matrix_norm norm vector_norm", X, of="linalg")
add("matrix_norm", X, of="linalg", ord="nuc")
add("renorm", X, 2, 0, 0.5)
add("sum_to_size", X, 1, 4)
add("quantile nanquantile", V, 0.5)
add("histogram", V, 3)
add("histogramdd", X, [2] * 4)
add_ways("batch_norm", (IMAGE, V, W),
         lambda x, w, b: F.batch_norm(x, None, None, w.float(), b.float(), True))  # fmt: skip
add_ways("instance_norm", (IMAGE, V, W),
         lambda x, w, b: F.instance_norm(x, weight=w.float(), bias=b.float()))  # fmt: skip
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # CSR is in beta state
    add_ways("sparse_sampled_addmm", (X.to_sparse_csr(), X, Y), torch.sparse.sampled_addmm)
add_ways("_sparse_mm", (X.to_sparse(), Y), torch.sparse.mm)
# Coordinates and regions of images.
add("grid_sampler grid_sampler_2d", IMAGE, GRID, 0, 0, False)
add("grid_sampler_3d", CUBE, values(1, 3, 3, 3, 3), 0, 0, False)
add("interpolate", IMAGE, 8)
add("interpolate", IMAGE, 8, mode="bicubic")
regions, nms = values(3, 5), torch.ops.torchvision.nms  # (image 0, x1, y1, x2, y2)
for op in ("ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool"):
    add_ways(f"torchvision.{op}", (IMAGE, regions, 2), getattr(torchvision.ops, op))
add_ways("torchvision.nms", (X, V, 0.5), torchvision.ops.nms, nms, nms.default)
deformed = IMAGE, values(2, 18, 4, 4), KERNEL
add_ways("torchvision.deform_conv2d", deformed, torchvision.ops.deform_conv2d)
# Fourier transforms, and complex numbers made of real ones.
for kind in ("fft", "hfft", "ifft", "ihfft", "irfft", "rfft"):
    for op in (kind, f"{kind}2", f"{kind}n"):
        add_ways(f"fft_{op}", (X,), real(getattr(torch.fft, op)))
stft = real(lambda x, w: torch.stft(x, 4, window=w, return_complex=True))
add_ways("stft", (LINE.flatten(), V), stft)
add_ways("complex", (X, Y), real(torch.complex))
add_ways("polar", (X, Y), real(torch.polar))
add_ways("view_as_complex", (values(4, 2),), real(torch.view_as_complex))
add_ways("linalg_eigvals", (POSITIVE,), real(torch.linalg.eigvals))
add_ways("linalg_eig", (POSITIVE,), lambda m: [part.real for part in torch.linalg.eig(m)])
# Decompositions, inverses, determinants and solves.
one = "cholesky cholesky_ex cond det eigh eigvalsh inv inv_ex ldl_factor ldl_factor_ex lu lu_factor"
one += " lu_factor_ex matrix_rank matrix_sqrth pinv polar qr slogdet svd svdvals"
add(one, POSITIVE, of="linalg")
add_ways("linalg_det", (POSITIVE,), torch.det, Tensor.det)
add_ways("linalg_inv", (POSITIVE,), torch.inverse, Tensor.inverse)
add("lstsq solve solve_ex", POSITIVE, Y, of="linalg")
add("householder_product tensorsolve", POSITIVE, V, of="linalg")
add("ldl_solve lu_solve", POSITIVE, PIVOTS, Y, of="linalg")
add("solve_triangular", POSITIVE, Y, of="linalg", upper=True)
add("matrix_power", POSITIVE, 3, of="linalg")
add("tensorinv", POSITIVE.reshape(2, 2, 2, 2), of="linalg")
add("vander", V, of="linalg")
add("cholesky_inverse geqrf logdet lu pinverse svd", POSITIVE)
add("cholesky_solve triangular_solve", Y, POSITIVE)
add("lu_solve", Y, POSITIVE, PIVOTS)
add("ormqr", POSITIVE, V, Y)
# Functions of `torch.special`.
one = "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx log_ndtr ndtri spherical_bessel_j0"
one += " modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1"
one += " scaled_modified_bessel_k0 scaled_modified_bessel_k1"
chebyshev = " ".join(f"chebyshev_polynomial_{kind}" for kind in "tuvw")
two = f"{chebyshev} {chebyshev.replace('cheb', 'shifted_cheb')} zeta hermite_polynomial_h"
two += " hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
add(one, X, of="special")
add(two, X, Y, of="special")
# Losses.
two = "binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss"
lengths = torch.tensor([[1, 2], [3, 1]]), torch.tensor([6, 6]), torch.tensor([2, 2])
of_c: Any = torch._C._nn
add(f"{two} smooth_l1_loss soft_margin_loss", X, Y, by="input target")
add("cosine_embedding_loss", X, Y, SIGNS, by="input1 input2 target")
add_ways("cross_entropy_loss", (X, CLASSES), F.cross_entropy, of_c.cross_entropy_loss)
add("ctc_loss", values(6, 2, 5).log_softmax(-1), *lengths)
add("hinge_embedding_loss", X, SIGNS.expand(4, 4))
add("margin_ranking_loss", V, W, SIGNS, by="input1 input2 target")
add("multi_margin_loss nll_loss", X, CLASSES, by="input target")
add("multilabel_margin_loss", X, CLASSES.expand(4, 4), by="input target")
pixels = X[None, :, :, None], CLASSES[None, :, None]
add_ways("nll_loss2d", (*pixels, None, 1, -100), of_c.nll_loss2d)
add_ways("nll_loss_nd", (X, CLASSES, torch.ones(4), 1, -100), of_c.nll_loss_nd)
add_ways("poisson_nll_loss", (X, Y), F.poisson_nll_loss)
add("triplet_margin_loss", X, Y, Z, by="anchor positive negative")
# Ops of several inputs that follow the widest.
add_ways("add", (X, Y), lambda x, y: x + y, lambda x, y: y.__radd__(x))
add_ways("atan2", (X, Y), torch.arctan2)
add_ways("div", (X, Y), lambda x, y: x / y, torch.divide, torch.true_divide)
add_ways("mul", (X, Y), lambda x, y: x * y, torch.multiply)
add_ways("sub", (X, Y), lambda x, y: x - y, torch.subtract, torch.rsub)
add("addcdiv addcmul", X, Y, Z, value=2.0)
add("bilinear", X, Y, values(3, 4, 4), BIAS)
add("cat column_stack dstack hstack stack vstack", [X, Y], by="tensors")
add_ways("cat", ([X, Y],), torch.concat, torch.concatenate)
add("cross", values(4, 3), values(4, 3), dim=1)
add("dot vdot cartesian_prod", V, W)
add("index_add index_copy", X, 0, INDEX, Y[:2], by="input dim index source")
add("index_put", X, (INDEX,), Y[:2])
add("index_reduce", X, 0, INDEX, Y[:2], "prod")
add("lerp", X, Y, 0.3)
add("masked_scatter", X, EYE, Y)
add("meshgrid", V, W, indexing="ij")
add("put", X, INDEX, V[:2])
add("scatter scatter_add", X, 0, SPREAD, Y[:2])
add("scatter_reduce", X, 0, SPREAD, Y[:2], "sum")
add("tensordot", X, Y, dims=1)
add_ways("where", (EYE, X, Y), torch.where, lambda mask, x, y: x.where(mask, y))
weighted = partial(F.embedding_bag, mode="sum")
bag = INDEX[None], X, values(1, 2)
add_ways("embedding_bag", bag, lambda i, x, w: weighted(i, x, per_sample_weights=w))
# Activations, dropout, padding and pooling: ops of one input.
names = "celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 rrelu selu"
add(f"{names} sigmoid silu tanh", X - 0.5)
for dims, data in ((1, LINE), (2, IMAGE), (3, CUBE)):
    for op in (f"avg_pool{dims}d", f"max_pool{dims}d"):
        add(f"{op} adaptive_{op}", data, 2)
add("dropout", X, 0.5, True)
add_ways("sigmoid", (X - 0.5,), torch.special.expit)
add_ways("log_sigmoid", (X,), F.logsigmoid)
add("pad", IMAGE, (1, 1, 1, 1))
add("pad", IMAGE, (1, 1, 1, 1), mode="reflect")
