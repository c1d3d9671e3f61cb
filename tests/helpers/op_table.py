"""A row for every op of every shipped list: inputs for it, and the spellings it has.

A spelling takes the row's inputs. Floating inputs are written in fp32; a test runs them in the
formats it is about.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

Spelling = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """An op as it can be called.

    Attributes:
        inputs: arguments of every spelling, floating ones in fp32.
        spellings: how it is written.
    """

    inputs: tuple[Any, ...]
    spellings: tuple[Spelling, ...]


_generator = torch.Generator().manual_seed(5)


def values(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9: in the domain of every op here, with small products."""
    return torch.rand(*shape, generator=_generator) * 0.8 + 0.1


X, Y, Z = values(4, 4), values(4, 4), values(4, 4)
V, W = values(4), values(4)
IMAGE, LINE, CUBE = values(2, 4, 6, 6), values(2, 4, 8), values(1, 2, 4, 4, 4)
INDEX = torch.tensor([2, 0])
CLASSES = torch.tensor([1, 0, 3, 2])
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
POSITIVE = X @ X.T + 2 * torch.eye(4)  # positive definite
PIVOTS = torch.arange(1, 5, dtype=torch.int32)


def unary(op: str, *more: Spelling, x: Tensor = X) -> Row:
    """`torch.op(x)`, `x.op()`, `torch.op(input=x)`, and more."""
    function = getattr(torch, op)
    return Row((x,), (function, lambda x: getattr(x, op)(), lambda x: function(input=x), *more))


def binary(op: str, *more: Spelling) -> Row:
    """`torch.op(x, y)`, `x.op(y)`, `torch.op(x, other=y)`, and more."""
    function = getattr(torch, op)
    by_name: Spelling = lambda x, y: function(x, other=y)  # noqa: E731
    return Row((X, Y), (function, lambda x, y: getattr(x, op)(y), by_name, *more))


def functional(op: str, *inputs: Any, **options: Any) -> Row:
    """`F.op(*inputs, **options)`, and all by name."""
    function = getattr(F, op)
    names = list(inspect.signature(function).parameters)[: len(inputs)]
    by_name: Spelling = lambda *given: function(**dict(zip(names, given)), **options)  # noqa: B905, E731
    return Row(inputs, (lambda *given: function(*given, **options), by_name))


def products() -> dict[str, Row]:
    """Matrix products and attention."""
    batch = values(2, 4, 4)
    heads = values(1, 2, 4, 4)
    square_weight, bias = values(4, 4), values(4)
    rows, experts, ends = values(4, 8), values(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
    return {
        "_grouped_mm": Row(
            (rows, experts, ends),
            (
                lambda x, w, ends: torch._grouped_mm(x, w, offs=ends),
                lambda x, w, ends: F.grouped_mm(x, w, offs=ends),
            ),
        ),
        "addbmm": Row((X, batch, batch), (torch.addbmm, lambda x, a, b: x.addbmm(a, b))),
        "addmm": Row(
            (X, Y, Z),
            (torch.addmm, lambda x, y, z: x.addmm(y, z), lambda x, y, z: torch.addmm(x, y, mat2=z)),
        ),
        "addmv": Row((V, X, W), (torch.addmv, lambda v, x, w: v.addmv(x, w))),
        "addr": Row((X, V, W), (torch.addr, lambda x, v, w: x.addr(v, w))),
        "baddbmm": Row((batch, batch, batch), (torch.baddbmm, lambda a, b, c: a.baddbmm(b, c))),
        "bmm": Row((batch, batch), (torch.bmm, lambda a, b: a.bmm(b))),
        "chain_matmul": Row((X, Y), (torch.chain_matmul,)),
        "einsum": Row(
            (X, Y),
            (
                lambda x, y: torch.einsum("ij,jk->ik", x, y),
                lambda x, y: torch.einsum("ij,jk->ik", [x, y]),
            ),
        ),
        "linalg_multi_dot": Row((X, Y, Z), (lambda *m: torch.linalg.multi_dot(list(m)),)),
        "linalg_vecdot": Row(
            (X, Y), (torch.linalg.vecdot, lambda x, y: torch.linalg.vecdot(x, y, dim=0))
        ),
        "linear": Row(
            (X, square_weight, bias),
            (
                F.linear,
                lambda x, w, b: F.linear(x, weight=w, bias=b),
                lambda x, w, b: F.linear(input=x, weight=w, bias=b),
            ),
        ),
        "matmul": Row(
            (X, Y),
            (
                torch.matmul,
                lambda x, y: x @ y,
                lambda x, y: x.matmul(y),
                lambda x, y: x.__rmatmul__(y),
                torch.linalg.matmul,
                lambda x, y: torch.matmul(input=x, other=y),
            ),
        ),
        "mm": Row((X, Y), (torch.mm, lambda x, y: x.mm(y), lambda x, y: torch.mm(x, mat2=y))),
        "mv": Row((X, V), (torch.mv, lambda x, v: x.mv(v))),
        "prelu": Row((X, V[:1]), (F.prelu, torch.prelu, lambda x, w: x.prelu(w))),
        "scaled_dot_product_attention": Row(
            (heads, heads, heads),
            (
                F.scaled_dot_product_attention,
                lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v),
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            ),
        ),
    }


def convolutions() -> dict[str, Row]:
    """Convolutions."""
    bias = values(3)
    line, image, cube = values(3, 4, 3), values(3, 4, 3, 3), values(3, 2, 3, 3, 3)
    t_line, t_image, t_cube = values(4, 3, 3), values(4, 3, 3, 3), values(2, 3, 3, 3, 3)

    def row(op: str, data: Tensor, weight: Tensor) -> Row:
        function = getattr(F, op)
        by_name: Spelling = lambda x, w, b: function(input=x, weight=w, bias=b)  # noqa: E731
        return Row((data, weight, bias), (function, getattr(torch, op), by_name))

    same = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    return {
        "conv1d": row("conv1d", LINE, line),
        "conv2d": row("conv2d", IMAGE, image),
        "conv3d": row("conv3d", CUBE, cube),
        "conv_transpose1d": row("conv_transpose1d", LINE, t_line),
        "conv_transpose2d": row("conv_transpose2d", IMAGE, t_image),
        "conv_transpose3d": row("conv_transpose3d", CUBE, t_cube),
        "conv_tbc": Row((values(8, 2, 4), values(3, 4, 3), bias), (torch.conv_tbc,)),
        "convolution": Row(
            (IMAGE, image, bias), (lambda x, w, b: torch.convolution(x, w, b, *same),)
        ),
    }


def recurrent() -> dict[str, Row]:
    """Recurrent layers and cells, as `nn.LSTM` and its like call them."""

    def layer(op: str, gates: int) -> Row:
        weights = [values(gates * 3, 4), values(gates * 3, 3), values(gates * 3), values(gates * 3)]
        state: Any = values(1, 2, 3)
        if op == "lstm":
            state = [state, values(1, 2, 3)]
        function = getattr(torch, op)
        options = True, 1, 0.0, False, False, False
        return Row(
            (values(5, 2, 4), state, weights), (lambda x, h, w: function(x, h, w, *options),)
        )

    def cell(op: str, gates: int) -> Row:
        weights = values(gates * 3, 4), values(gates * 3, 3), values(gates * 3), values(gates * 3)
        state: Any = values(2, 3)
        if op == "lstm_cell":
            state = [state, values(2, 3)]
        return Row((values(2, 4), state, *weights), (getattr(torch, op),))

    return {
        "gru": layer("gru", 3),
        "gru_cell": cell("gru_cell", 3),
        "lstm": layer("lstm", 4),
        "lstm_cell": cell("lstm_cell", 4),
        "rnn_relu": layer("rnn_relu", 1),
        "rnn_relu_cell": cell("rnn_relu_cell", 1),
        "rnn_tanh": layer("rnn_tanh", 1),
        "rnn_tanh_cell": cell("rnn_tanh_cell", 1),
    }


def pointwise_in_fp32() -> dict[str, Row]:
    """Exponentials, logarithms and powers."""
    names = "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh square tan"
    rows = {op: unary(op) for op in names.split()}
    rows["acos"] = unary("acos", torch.arccos, lambda x: x.arccos())
    rows["asin"] = unary("asin", torch.arcsin, lambda x: x.arcsin())
    rows["erfinv"] = unary("erfinv", torch.special.erfinv)
    rows["expm1"] = unary("expm1", torch.special.expm1)
    rows["log1p"] = unary("log1p", torch.special.log1p)
    rows["reciprocal"] = unary("reciprocal", lambda x: 1 / x)
    rows["softplus"] = Row((X,), (F.softplus, lambda x: F.softplus(input=x, beta=2.0)))
    rows["pow"] = Row(
        (X, Y),
        (
            lambda x, y: x**2,
            lambda x, y: x**y,
            lambda x, y: 2**x,
            lambda x, y: x.pow(2),
            lambda x, y: torch.pow(x, exponent=3),
            torch.pow,
        ),
    )
    return rows


def norms() -> dict[str, Row]:
    """Softmax and the norms of layers."""
    rows = {
        op: Row(
            (X,),
            (
                lambda x, op=op: getattr(torch, op)(x, 1),
                lambda x, op=op: getattr(x, op)(dim=-1),
                lambda x, op=op: getattr(F, op)(x, dim=1),
                lambda x, op=op: getattr(torch.special, op)(x, 1),
            ),
        )
        for op in ("softmax", "log_softmax")
    }
    return rows | {
        "group_norm": Row(
            (IMAGE, V, W),
            (
                lambda x, w, b: F.group_norm(x, 2, w, b),
                lambda x, w, b: torch.group_norm(x, 2, weight=w, bias=b),
            ),
        ),
        "layer_norm": Row(
            (X, V, W),
            (
                lambda x, w, b: F.layer_norm(x, (4,), w, b),
                lambda x, w, b: torch.layer_norm(x, (4,), weight=w, bias=b),
            ),
        ),
        "native_layer_norm": Row(
            (X, V, W), (lambda x, w, b: torch.native_layer_norm(x, (4,), w, b, 1e-5),)
        ),
        "rms_norm": Row(
            (X, V),
            (lambda x, w: F.rms_norm(x, (4,), w), lambda x, w: torch.rms_norm(x, (4,), weight=w)),
        ),
        "batch_norm": Row((IMAGE, V, W), (_batch_norm(F.batch_norm),)),
        "instance_norm": Row(
            (IMAGE, V, W),
            (lambda x, w, b: F.instance_norm(x, weight=w.float(), bias=b.float()),),
        ),
        "local_response_norm": Row((IMAGE,), (lambda x: F.local_response_norm(x, 2),)),
    }


def _batch_norm(function: Spelling) -> Spelling:
    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mean, var = torch.zeros(4, device=x.device), torch.ones(4, device=x.device)
        return function(x, mean, var, weight.float(), bias.float(), True)

    return call


def reductions() -> dict[str, Row]:
    """Sums, products and norms over many numbers, and distances."""
    return {
        "cumprod": Row((X,), (lambda x: torch.cumprod(x, 0), lambda x: x.cumprod(dim=0))),
        "cumsum": Row((X,), (lambda x: torch.cumsum(x, 0), lambda x: x.cumsum(dim=0))),
        "cumulative_trapezoid": Row((X,), (torch.cumulative_trapezoid,)),
        "frobenius_norm": Row((X,), (lambda x: torch.frobenius_norm(x, dim=(0, 1)),)),
        "linalg_matrix_norm": Row(
            (X,), (torch.linalg.matrix_norm, lambda x: torch.linalg.matrix_norm(x, ord="nuc"))
        ),
        "linalg_norm": Row((X,), (torch.linalg.norm, lambda x: torch.linalg.norm(x, dim=0))),
        "linalg_vector_norm": Row(
            (X,), (torch.linalg.vector_norm, lambda x: torch.linalg.vector_norm(x, ord=1, dim=0))
        ),
        "logsumexp": Row(
            (X,),
            (
                lambda x: torch.logsumexp(x, 0),
                lambda x: x.logsumexp(dim=0),
                lambda x: torch.special.logsumexp(x, 0),
            ),
        ),
        "norm": Row((X,), (torch.norm, lambda x: x.norm(), lambda x: torch.norm(x, p=1, dim=0))),
        "nuclear_norm": Row((X,), (torch.nuclear_norm,)),
        "prod": Row((X,), (torch.prod, lambda x: x.prod(0), lambda x: x.prod(dim=0, keepdim=True))),
        "renorm": Row(
            (X,), (lambda x: torch.renorm(x, 2, 0, 0.5), lambda x: x.renorm(2, 0, maxnorm=0.5))
        ),
        "sum": Row((X,), (torch.sum, lambda x: x.sum(), lambda x: x.sum(dim=(0, 1)))),
        "sum_to_size": Row((X,), (lambda x: x.sum_to_size(1, 4),)),
        "trapezoid": Row((X,), (torch.trapezoid, torch.trapz)),
        "cdist": Row((X, Y), (torch.cdist, lambda x, y: torch.cdist(x, x2=y, p=1.0))),
        "cosine_similarity": Row((X, Y), (F.cosine_similarity, torch.cosine_similarity)),
        "dist": Row((X, Y), (torch.dist, lambda x, y: x.dist(y, p=1))),
        "pairwise_distance": Row((X, Y), (F.pairwise_distance, torch.pairwise_distance)),
        "pdist": Row((X,), (F.pdist, torch.pdist)),
        "grid_sampler": Row(
            (IMAGE, values(2, 3, 3, 2)),
            (
                lambda x, grid: torch.grid_sampler(x, grid, 0, 0, False),
                lambda x, grid: F.grid_sample(x, grid, align_corners=False),
            ),
        ),
        "grid_sampler_2d": Row(
            (IMAGE, values(2, 3, 3, 2)), (lambda x, g: torch.grid_sampler_2d(x, g, 0, 0, False),)
        ),
        "grid_sampler_3d": Row(
            (CUBE, values(1, 3, 3, 3, 3)), (lambda x, g: torch.grid_sampler_3d(x, g, 0, 0, False),)
        ),
        "interpolate": Row(
            (IMAGE,),
            (
                lambda x: F.interpolate(x, size=8),
                lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
                lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
            ),
        ),
    }


def spectra() -> dict[str, Row]:
    """Fourier transforms, and complex numbers made of real ones; seen by their real parts."""
    kinds = "fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn"
    rows = {
        f"fft_{kind}": Row((X,), (lambda x, kind=kind: getattr(torch.fft, kind)(x).real.clone(),))
        for kind in f"{kinds} irfft irfft2 irfftn rfft rfft2 rfftn".split()
    }
    return rows | {
        "stft": Row(
            (LINE.flatten(), values(4)),
            (
                lambda x, w: torch.stft(x, 4, window=w, return_complex=True).real,
                lambda x, w: x.stft(4, window=w, return_complex=True).real,
            ),
        ),
        "complex": Row((X, Y), (lambda x, y: torch.complex(x, y).real,)),
        "polar": Row((X, Y), (lambda x, y: torch.polar(x, y).real,)),
        "view_as_complex": Row((values(4, 2),), (lambda x: torch.view_as_complex(x).real,)),
    }


def decompositions() -> dict[str, Row]:
    """Decompositions, inverses, determinants and solves."""
    one = "cholesky cholesky_ex cond det eigh eigvalsh inv inv_ex ldl_factor ldl_factor_ex lu"
    one += " lu_factor lu_factor_ex matrix_rank matrix_sqrth pinv polar qr slogdet svd svdvals"
    linalg = {op: Row((POSITIVE,), (getattr(torch.linalg, op),)) for op in one.split()}
    two = "lstsq solve solve_ex"
    linalg |= {op: Row((POSITIVE, Y), (getattr(torch.linalg, op),)) for op in two.split()}
    linalg["det"] = Row((POSITIVE,), (torch.linalg.det, torch.det, lambda m: m.det()))
    linalg["inv"] = Row((POSITIVE,), (torch.linalg.inv, torch.inverse, lambda m: m.inverse()))
    linalg |= {
        "eig": Row((POSITIVE,), (lambda m: [part.real for part in torch.linalg.eig(m)],)),
        "eigvals": Row((POSITIVE,), (lambda m: torch.linalg.eigvals(m).real,)),
        "householder_product": Row((POSITIVE, V), (torch.linalg.householder_product, torch.orgqr)),
        "ldl_solve": Row((POSITIVE, PIVOTS, Y), (torch.linalg.ldl_solve,)),
        "lu_solve": Row((POSITIVE, PIVOTS, Y), (torch.linalg.lu_solve,)),
        "solve_triangular": Row(
            (POSITIVE, Y), (lambda m, y: torch.linalg.solve_triangular(m, y, upper=True),)
        ),
        "matrix_power": Row(
            (POSITIVE,),
            (
                lambda m: torch.linalg.matrix_power(m, -1),
                lambda m: torch.matrix_power(m, 3),
                lambda m: m.matrix_power(n=2),
            ),
        ),
        "tensorinv": Row((POSITIVE.reshape(2, 2, 2, 2),), (torch.linalg.tensorinv,)),
        "tensorsolve": Row((POSITIVE, V), (torch.linalg.tensorsolve,)),
        "vander": Row((V,), (torch.linalg.vander,)),
    }
    return {f"linalg_{op}": row for op, row in linalg.items()} | {
        "cholesky_inverse": unary("cholesky_inverse", x=POSITIVE),
        "cholesky_solve": Row(
            (Y, POSITIVE), (torch.cholesky_solve, lambda y, m: y.cholesky_solve(m))
        ),
        "geqrf": unary("geqrf", x=POSITIVE),
        "logdet": unary("logdet", x=POSITIVE),
        "lu": Row((POSITIVE,), (torch.lu, lambda m: m.lu())),
        "lu_solve": Row((Y, POSITIVE, PIVOTS), (torch.lu_solve,)),
        "ormqr": Row((POSITIVE, V, Y), (torch.ormqr,)),
        "pinverse": unary("pinverse", x=POSITIVE),
        "svd": unary("svd", x=POSITIVE),
        "triangular_solve": Row((Y, POSITIVE), (torch.triangular_solve,)),
    }


def special_functions() -> dict[str, Row]:
    """Functions of `torch.special` that have no half kernel."""
    one = "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx log_ndtr ndtri spherical_bessel_j0"
    one += " modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1"
    one += " scaled_modified_bessel_k0 scaled_modified_bessel_k1"
    two = "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v zeta"
    two += " chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he"
    two += " laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t"
    two += " shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v"
    two += " shifted_chebyshev_polynomial_w"
    rows = {op: Row((X,), (getattr(torch.special, op),)) for op in one.split()}
    rows |= {op: Row((X, Y), (getattr(torch.special, op),)) for op in two.split()}
    return {f"special_{op}": row for op, row in rows.items()}


def without_half_kernel() -> dict[str, Row]:
    """Sparse products, quantiles, histograms and comparisons."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is in beta state
        compressed = X.to_sparse_csr()
    return {
        "_sparse_mm": Row((X.to_sparse(), Y), (torch.sparse.mm,)),
        "sparse_sampled_addmm": Row((compressed, X, Y), (torch.sparse.sampled_addmm,)),
        "histogram": Row((V,), (lambda v: torch.histogram(v, 3), lambda v: v.histogram(3))),
        "histogramdd": Row((X,), (lambda x: torch.histogramdd(x, [2] * 4),)),
        "nanquantile": Row((V,), (lambda v: v.nanquantile(0.5),)),
        "quantile": Row((V,), (lambda v: v.quantile(0.5), lambda v: torch.quantile(v, 0.25))),
        "allclose": Row((X, Y), (torch.allclose, lambda x, y: x.allclose(y))),
        "isclose": Row((X, Y), (torch.isclose, lambda x, y: x.isclose(y))),
    }


def of_torchvision() -> dict[str, Row]:
    """Boxes and regions of images."""
    ops, regions = torchvision.ops, values(3, 5)  # (image 0, x1, y1, x2, y2)
    rows = {
        op: Row((IMAGE, regions), (lambda x, r, op=op: getattr(ops, op)(x, r, 2),))
        for op in ("ps_roi_align", "ps_roi_pool", "roi_align", "roi_pool")
    }
    rows["nms"] = Row(
        (X, V),
        (
            lambda boxes, scores: ops.nms(boxes, scores, 0.5),
            lambda boxes, scores: torch.ops.torchvision.nms(boxes, scores, 0.5),
            lambda boxes, scores: torch.ops.torchvision.nms.default(boxes, scores, 0.5),
        ),
    )
    rows["deform_conv2d"] = Row(
        (IMAGE, values(2, 18, 4, 4), values(3, 4, 3, 3)), (torchvision.ops.deform_conv2d,)
    )
    return {f"torchvision.{op}": row for op, row in rows.items()}


def losses() -> dict[str, Row]:
    """Losses."""
    target, ones = Y, torch.ones(4)
    log_probabilities = values(6, 2, 5).log_softmax(-1)
    lengths = (torch.tensor([[1, 2], [3, 1]]), torch.tensor([6, 6]), torch.tensor([2, 2]))
    two = ("binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div")
    two += ("l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss")
    reduction = {"kl_div": "batchmean"}
    rows = {op: functional(op, X, target, reduction=reduction.get(op, "mean")) for op in two}
    return rows | {
        "cosine_embedding_loss": functional("cosine_embedding_loss", X, Y, SIGNS),
        "cross_entropy_loss": Row(
            (X, CLASSES),
            (
                F.cross_entropy,
                lambda x, t: F.cross_entropy(input=x, target=t, label_smoothing=0.1),
                torch._C._nn.cross_entropy_loss,
            ),
        ),
        "ctc_loss": Row(
            (log_probabilities, *lengths),
            (
                F.ctc_loss,
                lambda p, t, i, o: F.ctc_loss(p, targets=t, input_lengths=i, target_lengths=o),
            ),
        ),
        "hinge_embedding_loss": functional("hinge_embedding_loss", X, SIGNS.expand(4, 4)),
        "margin_ranking_loss": functional("margin_ranking_loss", V, W, SIGNS),
        "multi_margin_loss": functional("multi_margin_loss", X, CLASSES),
        "multilabel_margin_loss": functional("multilabel_margin_loss", X, CLASSES.expand(4, 4)),
        "nll_loss": functional("nll_loss", X, CLASSES),
        "nll_loss2d": Row(
            (X[None, :, :, None], CLASSES[None, :, None]),
            (lambda x, t: torch._C._nn.nll_loss2d(x, t, None, 1, -100),),
        ),
        "nll_loss_nd": Row(
            (X, CLASSES, ones), (lambda x, t, w: torch._C._nn.nll_loss_nd(x, t, w, 1, -100),)
        ),
        "triplet_margin_loss": functional("triplet_margin_loss", X, Y, Z),
    }


def promoting() -> dict[str, Row]:
    """Ops of several inputs that follow the widest."""
    rows = {op: binary(op) for op in ("atan2", "maximum", "minimum")}
    rows["add"] = binary("add", lambda x, y: x + y, lambda x, y: y.__radd__(x))
    rows["atan2"] = binary("atan2", torch.arctan2)
    rows["div"] = binary("div", lambda x, y: x / y, torch.divide, torch.true_divide)
    rows["mul"] = binary("mul", lambda x, y: x * y, torch.multiply)
    rows["sub"] = binary("sub", lambda x, y: x - y, torch.subtract, torch.rsub)
    pair = Y[:2]
    three = values(4, 3)
    return rows | {
        "addcdiv": Row((X, Y, Z), (torch.addcdiv, lambda x, y, z: x.addcdiv(y, z, value=2.0))),
        "addcmul": Row((X, Y, Z), (torch.addcmul, lambda x, y, z: x.addcmul(y, z, value=2.0))),
        "bilinear": Row((X, Y, values(3, 4, 4), values(3)), (F.bilinear, torch.bilinear)),
        "cat": Row(
            (X, Y),
            (
                lambda *xs: torch.cat(xs),
                lambda *xs: torch.cat(list(xs), dim=1),
                lambda *xs: torch.cat(tensors=list(xs)),
                lambda *xs: torch.concat(xs),
                lambda *xs: torch.concatenate(xs),
            ),
        ),
        "column_stack": Row((X, Y), (lambda *xs: torch.column_stack(xs),)),
        "cross": Row(
            (three, three + 1),
            (
                lambda a, b: torch.cross(a, b, dim=1),
                torch.linalg.cross,
                lambda a, b: a.cross(b, dim=1),
            ),
        ),
        "dot": Row((V, W), (torch.dot, lambda v, w: v.dot(w))),
        "dstack": Row((X, Y), (lambda *xs: torch.dstack(xs),)),
        "embedding_bag": Row(
            (X, values(1, 2)),
            (
                lambda x, w: F.embedding_bag(
                    INDEX[None].to(x.device), x, per_sample_weights=w, mode="sum"
                ),
            ),
        ),
        "heaviside": Row((X, Y), (torch.heaviside, lambda x, y: x.heaviside(values=y))),
        "hstack": Row((X, Y), (lambda *xs: torch.hstack(xs),)),
        "cartesian_prod": Row((V, W), (torch.cartesian_prod,)),
        "index_add": Row(
            (X, pair),
            (
                lambda x, v: torch.index_add(x, 0, INDEX.to(x.device), v),
                lambda x, v: x.index_add(0, index=INDEX.to(x.device), source=v),
            ),
        ),
        "index_copy": Row(
            (X, pair),
            (
                lambda x, v: torch.index_copy(x, 0, INDEX.to(x.device), v),
                lambda x, v: x.index_copy(0, index=INDEX.to(x.device), source=v),
            ),
        ),
        "index_put": Row(
            (X, pair),
            (
                lambda x, v: torch.index_put(x, (INDEX.to(x.device),), v),
                lambda x, v: x.index_put((INDEX.to(x.device),), values=v),
            ),
        ),
        "index_reduce": Row(
            (X, pair), (lambda x, v: x.index_reduce(0, INDEX.to(x.device), v, "prod"),)
        ),
        "inner": Row((X, Y), (torch.inner, lambda x, y: x.inner(y))),
        "masked_scatter": Row(
            (X, Y),
            (lambda x, y: x.masked_scatter(torch.eye(4, dtype=torch.bool, device=x.device), y),),
        ),
        "meshgrid": Row((V, W), (lambda *vs: torch.meshgrid(*vs, indexing="ij"),)),
        "put": Row((X, V[:2]), (lambda x, v: x.put(INDEX.to(x.device), v),)),
        "scatter_reduce": Row(
            (X, pair),
            (lambda x, v: x.scatter_reduce(0, CLASSES.expand(2, 4).to(x.device), v, "sum"),),
        ),
        "lerp": Row(
            (X, Y), (lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: x.lerp(y, weight=0.3))
        ),
        "scatter": Row(
            (X, pair), (lambda x, v: x.scatter(0, CLASSES.expand(2, 4).to(x.device), v),)
        ),
        "scatter_add": Row(
            (X, pair), (lambda x, v: torch.scatter_add(x, 0, CLASSES.expand(2, 4).to(x.device), v),)
        ),
        "stack": Row(
            (X, Y), (lambda *xs: torch.stack(xs), lambda *xs: torch.stack(list(xs), dim=1))
        ),
        "tensordot": Row((X, Y), (lambda x, y: torch.tensordot(x, y, dims=1),)),
        "vdot": Row((V, W), (torch.vdot, lambda v, w: v.vdot(w))),
        "vstack": Row((X, Y), (lambda *xs: torch.vstack(xs), lambda *xs: torch.row_stack(xs))),
        "where": Row(
            (X, Y),
            (
                lambda x, y: torch.where(torch.eye(4, dtype=torch.bool, device=x.device), x, y),
                lambda x, y: x.where(torch.eye(4, dtype=torch.bool, device=x.device), y),
            ),
        ),
    }


def following() -> dict[str, Row]:
    """Activations, dropout, padding and pooling: ops of one input."""
    names = "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu"
    rows = {op: Row((X - 0.5,), (getattr(F, op),)) for op in names.split()}
    rows |= {op: unary(op, getattr(torch.special, name)) for op, name in (("sigmoid", "expit"),)}
    sizes = {1: LINE, 2: IMAGE, 3: CUBE}
    for dims, data in sizes.items():
        for kind in ("avg", "max"):
            for op in (f"{kind}_pool{dims}d", f"adaptive_{kind}_pool{dims}d"):
                rows[op] = Row((data,), (lambda x, op=op: getattr(F, op)(x, 2),))
    return rows | {
        "dropout": Row((X,), (F.dropout, lambda x: torch.dropout(x, 0.5, True))),
        "glu": Row((X,), (F.glu, lambda x: F.glu(x, dim=0))),
        "log_sigmoid": Row((X,), (F.logsigmoid,)),
        "pad": Row(
            (IMAGE,), (lambda x: F.pad(x, (1, 1)), lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"))
        ),
        "rrelu": Row((X - 0.5,), (F.rrelu, torch.rrelu, lambda x: F.rrelu(x, training=True))),
        "relu": Row((X - 0.5,), (F.relu, torch.relu, lambda x: x.relu())),
        "tanh": unary("tanh", torch.nn.Tanh()),
    }


TABLE: dict[str, Row] = {
    **products(),
    **convolutions(),
    **recurrent(),
    **pointwise_in_fp32(),
    **norms(),
    **reductions(),
    **spectra(),
    **decompositions(),
    **special_functions(),
    **without_half_kernel(),
    **of_torchvision(),
    **losses(),
    **promoting(),
    **following(),
}
