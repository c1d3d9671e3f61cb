"""The dtype map says what is done: op by op, module by module, in storage and in compute."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from vocabulary import HALVES, CalledOps, Kernels, formats

from mpframe import OpLists, Precision
from mpframe.core.casting.storage import op_of
from mpframe.core.errors import ConfigError
from mpframe.tracking.dtype_map import as_table, dtype_map

FP32, HALF = torch.float32, torch.float16


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(7, 8),
            "encoder": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            "norm": nn.BatchNorm1d(8),
            "head": nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1)),
        }
    )


def lists(name: str = "default", pins: dict[str, str] | None = None) -> OpLists:
    return replace(OpLists.named(name), modules=pins or {})


def test_the_table() -> None:
    """Printed before the first step: a small model with every kind of reason."""
    model = nn.Sequential()
    model.conv = nn.Conv2d(1, 2, 3)
    model.norm = nn.BatchNorm2d(2)
    model.act = nn.ReLU()
    model.soft = nn.Softmax(1)
    model.head = nn.Linear(2, 2)
    model.own = Own()
    precision = Precision("mixed", ops=lists(pins={"head": "fp32"}))
    assert (
        as_table(dtype_map(precision, model))
        == """\
module  type         weights  computes in   why
------  -----------  -------  ------------  -------------------------------
conv    Conv2d       float16  float16       conv2d in ops.allow
norm    BatchNorm2d  float32  as PyTorch    batch_norm is in no list
act     ReLU         -        widest input  relu in ops.infer
soft    Softmax      -        float32       softmax in ops.deny
head    Linear       float32  float32       ops.modules['head']=fp32
own     Own          float32  -             no op of torch.nn: fp32 weights"""
    )


class Own(nn.Module):
    """A module with a weight and no op of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("mode", "name", "words"),
    [("fp32", "default", "dtype.mode=fp32"), ("mixed", "none", "ops=none: no casts")],
)
def test_reasons_of_modes(mode: str, name: str, words: str) -> None:
    rows = dtype_map(Precision(mode, ops=OpLists.named(name)), nn.Sequential(nn.Linear(2, 2)))
    assert [row.why for row in rows] == [words]


PINNED = {"head": "fp32", "encoder": "half"}


@pytest.mark.parametrize(
    ("mode", "name", "modules", "half"),
    [
        ("mixed", "default", {}, "float16"),
        ("mixed", "fast", PINNED, "bfloat16"),
        ("mixed", "fp32_norms", {"head.0": "half"}, "float16"),
        ("mixed", "none", PINNED, "float16"),
        ("amp", "default", PINNED, "bfloat16"),
        ("fp32", "fast", PINNED, "float16"),
    ],
)
def test_weights_are_stored_as_the_map_says(
    mode: str, name: str, modules: dict[str, str], half: str
) -> None:
    """The map is the same before and after the weights are prepared."""
    model = transformer()
    precision = Precision(mode, half, ops=lists(name, modules))
    before = dtype_map(precision, model)
    rows = {row.module: row.storage for row in before}
    precision.prepare(model, SGD(model.parameters()))
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            assert parameter.dtype == rows[path]
    assert dtype_map(precision, model) == before


@pytest.mark.parametrize(("name", "pins"), [("default", {"norm": "half"}), ("fp32_norms", {})])
def test_weights_beside_running_statistics_stay_fp32(name: str, pins: dict[str, str]) -> None:
    model = transformer()
    Precision("mixed", ops=lists(name, pins)).prepare(model, SGD(model.parameters()))
    norm = model["norm"]  # type: ignore[index]
    assert formats([norm.weight, norm.bias, norm.running_mean, norm.running_var]) == {FP32}


def test_statistics_that_arrive_in_half_are_widened() -> None:
    model = nn.BatchNorm1d(3).half()
    Precision("mixed").prepare(model, SGD(model.parameters()))
    assert formats([*model.parameters(), *model.buffers()]) == {FP32}


def test_without_lists_everything_is_half_and_inputs_follow_the_weights() -> None:
    """Half in training; fp32 while an evaluation has put fp32 weights in their place."""
    model = transformer()
    Precision("mixed", ops=OpLists.named("none")).prepare(model, SGD(model.parameters()))
    assert formats([*model.parameters(), *model.buffers()]) == {HALF}
    assert model["norm"].num_batches_tracked.dtype == torch.int64  # type: ignore[index]
    head = nn.Sequential(nn.Linear(2, 2))
    Precision("mixed", ops=OpLists()).prepare(head, SGD(head.parameters()))
    assert head(torch.ones(1, 2)).dtype == HALF
    for parameter in head.parameters():
        parameter.data = parameter.data.float()
    assert head(torch.ones(1, 2).half()).dtype == FP32


def test_gradients_that_are_there_already_follow_their_weight() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    Precision("mixed").prepare(model, SGD(model.parameters()))
    assert formats([p.grad for p in model.parameters()]) == {HALF}


@pytest.mark.parametrize("pattern", ["haed", "encoder.linear"])
def test_a_pin_that_matches_nothing_is_refused(pattern: str) -> None:
    model = transformer()
    precision = Precision("mixed", ops=OpLists(modules={pattern: "fp32"}))
    with pytest.raises(ConfigError) as error:
        precision.prepare(model, SGD(model.parameters()))
    assert str(error.value) == (
        f"ops.modules[{pattern!r}] matches no module; the model has embed, encoder, "
        "encoder.self_attn, encoder.self_attn.out_proj, encoder.linear1, encoder.dropout, "
        "encoder.linear2, encoder.norm1, ..."
    )
    assert formats(list(model.parameters())) == {FP32}


LINE, IMAGE, CUBE = torch.rand(2, 4, 8), torch.rand(2, 4, 8, 8), torch.rand(2, 4, 8, 8, 8)
ROWS, CLASSES, SIGNS = torch.rand(4, 4), torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, -1, 1, -1])
Case = tuple[Callable[[], nn.Module], tuple[Any, ...]]


def modules_of_one_input() -> Iterator[Case]:
    rows = "CELU ELU GELU GLU Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU ReLU "
    rows += "ReLU6 SELU SiLU Sigmoid Softplus Tanh Dropout Softmax LogSoftmax Softmin"
    for name in rows.split():
        arguments = (-1,) if "oftm" in name or name == "GLU" else ()
        yield lambda n=name, a=arguments: getattr(nn, n)(*a), (ROWS,)
    for dims, data in ((1, LINE), (2, IMAGE), (3, CUBE)):
        for kind in ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool"):
            yield lambda n=f"{kind}{dims}d": getattr(nn, n)(2), (data,)
        for kind in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
            yield lambda n=f"{kind}{dims}d": getattr(nn, n)(1), (data,)
        for kind in ("BatchNorm", "InstanceNorm"):
            yield lambda n=f"{kind}{dims}d": getattr(nn, n)(4, affine=True), (data,)
        for kind in ("Conv", "ConvTranspose"):
            yield lambda n=f"{kind}{dims}d": getattr(nn, n)(4, 3, 2), (data,)
    yield lambda: nn.GroupNorm(2, 4), (IMAGE,)
    yield lambda: nn.LayerNorm(8), (IMAGE,)
    yield lambda: nn.RMSNorm(8), (IMAGE,)
    yield lambda: nn.LocalResponseNorm(2), (IMAGE,)
    yield lambda: nn.Softmax2d(), (IMAGE,)
    yield lambda: nn.Upsample(scale_factor=2), (IMAGE,)
    yield lambda: nn.UpsamplingBilinear2d(scale_factor=2), (IMAGE,)
    yield lambda: nn.Linear(4, 3), (ROWS,)
    yield lambda: nn.Bilinear(4, 4, 3), (ROWS, ROWS)
    yield lambda: nn.Embedding(5, 3), (CLASSES,)
    yield lambda: nn.EmbeddingBag(5, 3), (CLASSES[None],)
    yield lambda: nn.MultiheadAttention(8, 2, batch_first=True), (LINE, LINE, LINE, None, False)
    for name in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"):
        yield lambda n=name: getattr(nn, n)(4, 3), (ROWS,)
    yield lambda: nn.RNN(4, 3, nonlinearity="relu"), (ROWS,)
    yield lambda: nn.RNNCell(4, 3, nonlinearity="relu"), (ROWS,)


def losses() -> Iterator[Case]:
    plain = ["BCE", "BCEWithLogits", "L1", "MSE", "SmoothL1", "Huber", "PoissonNLL", "SoftMargin"]
    for name in plain:
        yield lambda n=f"{name}Loss": getattr(nn, n)(), (ROWS, ROWS)
    yield lambda: nn.KLDivLoss(reduction="batchmean"), (ROWS, ROWS)
    for name in ("CrossEntropy", "NLL", "MultiMargin"):
        yield lambda n=f"{name}Loss": getattr(nn, n)(), (ROWS, CLASSES)
    yield lambda: nn.MultiLabelMarginLoss(), (ROWS, CLASSES.expand(4, 4))
    yield lambda: nn.HingeEmbeddingLoss(), (ROWS, SIGNS)
    yield lambda: nn.CosineEmbeddingLoss(), (ROWS, ROWS, SIGNS)
    yield lambda: nn.MarginRankingLoss(), (ROWS[0], ROWS[1], SIGNS)
    yield lambda: nn.TripletMarginLoss(), (ROWS, ROWS, ROWS)
    yield lambda: nn.CosineSimilarity(), (ROWS, ROWS)
    yield lambda: nn.PairwiseDistance(), (ROWS, ROWS)
    scores, lengths = torch.rand(8, 2, 5).log_softmax(-1), (torch.tensor([8, 8]), CLASSES[2:])
    yield lambda: nn.CTCLoss(), (scores, torch.ones(2, 3).long(), *lengths)


CASES = [*modules_of_one_input(), *losses()]


def test_the_op_of_a_module_is_one_it_runs() -> None:
    """Seen from outside, and with every function opened, as casts see it."""
    others = set()
    for make, inputs in CASES:
        module, outside, inside = make(), CalledOps(), CalledOps()
        with inside, Precision("amp", ops=OpLists(infer=frozenset({"exp2"}))).cast(), outside:
            module(*inputs)
        if op_of(module) not in outside.names + inside.names:
            others.add(type(module).__name__)
    assert others == set()


@pytest.mark.parametrize("half", HALVES)
def test_modules_compute_as_the_map_says(half: str) -> None:
    """Prepared as in a run; what their kernels were given and what they returned."""
    dtype, seen = HALVES[half], set()
    for make, inputs in CASES:
        model = nn.Sequential(make())
        precision = Precision("mixed", half, compute="native")
        (row,) = (r for r in dtype_map(precision, model) if r.module == "0")
        precision.prepare(model, SGD([nn.Parameter(torch.ones(1))]))
        floats = (isinstance(t, Tensor) and t.is_floating_point() for t in inputs)
        given = [t.to(dtype) if cast else t for t, cast in zip(inputs, floats, strict=True)]
        kernels = Kernels()
        with kernels, precision.cast():
            result = model[0](*given)
        if row.compute == "float32":
            allowed = {FP32, dtype} if row.kind == "Softmin" else {FP32}
            assert formats(result) == {FP32}, row
        elif row.compute == half:
            allowed = {dtype, FP32} if row.kind == "MultiheadAttention" else {dtype}
            assert row.storage in (dtype, None), row
        else:
            continue
        assert kernels.given() <= allowed, row
        seen.add(row.compute)
    assert seen == {"float32", half}


def test_every_layer_of_torch_with_weights_is_known() -> None:
    """A new layer of torch must be looked at before its weights are stored in anything but fp32."""
    unknown = set()
    for name, cls in vars(nn).items():
        if (
            inspect.isclass(cls)
            and issubclass(cls, nn.Module)
            and "weight" in getattr(cls, "__annotations__", {})
        ):
            module = cls.__new__(cls)
            nn.Module.__init__(module)
            module.mode, module.nonlinearity = "LSTM", "tanh"
            if op_of(module) is None:
                unknown.add(name)
    assert unknown == set()


def test_a_subclass_is_its_layer() -> None:
    class Mine(nn.Linear):
        pass

    class Loss(nn.Module):  # a name of torch.nn alone says nothing
        pass

    assert op_of(Mine(2, 2)) == "linear"
    assert op_of(Loss()) is None
