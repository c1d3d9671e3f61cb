"""The dtype map says what is done: op by op, module by module, in storage and in compute."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from vocabulary import Kernels, formats

from mpframe import OpLists, Precision
from mpframe.core.casting.storage import op_of
from mpframe.core.errors import ConfigError
from mpframe.tracking.dtype_map import as_table, dtype_map

FP32, HALF = torch.float32, torch.float16


def transformer() -> nn.ModuleDict:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1))
    parts = {"embed": nn.Embedding(7, 8), "encoder": encoder, "norm": nn.BatchNorm1d(8)}
    return nn.ModuleDict({**parts, "head": head})


def lists(name: str = "default", pins: dict[str, str] | None = None) -> OpLists:
    return replace(OpLists.named(name), modules=pins or {})


class Own(nn.Linear):
    """A layer of a class that is not torch's."""


class Weight(nn.Module):
    """A module with a weight and no op of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def test_the_table() -> None:
    parts = {"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "act": nn.ReLU()}
    parts |= {"soft": nn.Softmax(1), "head": nn.Linear(2, 2), "sub": Own(2, 2), "own": Weight()}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    precision = Precision("mixed", ops=lists(pins={"head": "fp32"}))
    assert as_table(dtype_map(precision, model)).splitlines()[2:] == [
        "conv    Conv2d       float16  float16       conv2d in ops.allow",
        "norm    BatchNorm2d  float32  as PyTorch    batch_norm is in no list",
        "act     ReLU         -        widest input  relu in ops.infer",
        "soft    Softmax      -        float32       softmax in ops.deny",
        "head    Linear       float32  float32       ops.modules['head']=fp32",
        "sub     Own          float16  float16       linear in ops.allow",
        "own     Weight       float32  -             no op of torch.nn: fp32 weights",
    ]
    for mode, name, why in (
        ("fp32", "default", "dtype.mode=fp32"),
        ("mixed", "none", "ops=none: no casts"),
    ):
        rows = dtype_map(Precision(mode, ops=OpLists.named(name)), model[:1])
        assert [row.why for row in rows] == [why]


PINNED = {"head": "fp32", "encoder": "half"}


@pytest.mark.parametrize(
    ("mode", "name", "modules", "half"),
    [
        ("mixed", "fast", PINNED, "bfloat16"),
        ("mixed", "fp32_norms", {"head.0": "half"}, "float16"),
        ("mixed", "none", PINNED, "float16"),
        ("amp", "default", PINNED, "bfloat16"),
        ("fp32", "fast", PINNED, "float16"),
    ],
)
def test_storage_is_as_the_map_says(
    mode: str, name: str, modules: dict[str, str], half: str
) -> None:
    model = transformer()
    precision = Precision(mode, half, ops=lists(name, modules))
    before = dtype_map(precision, model)
    rows = {row.module: row.storage for row in before}
    precision.prepare(model, SGD(model.parameters()))
    for path, module in model.named_modules():
        assert formats(list(module.parameters(recurse=False))) <= {rows.get(path)}
    assert dtype_map(precision, model) == before


@pytest.mark.parametrize(("name", "pins"), [("default", {"norm": "half"}), ("fp32_norms", {})])
def test_weights_beside_running_statistics_stay_fp32(name: str, pins: dict[str, str]) -> None:
    model = transformer()
    model["norm"].half()
    Precision("mixed", ops=lists(name, pins)).prepare(model, SGD(model.parameters()))
    assert formats([*model["norm"].parameters(), *model["norm"].buffers()]) == {FP32}


def test_inputs_and_gradients_follow_the_weights() -> None:
    head = nn.Sequential(nn.Linear(2, 2))
    head(torch.ones(1, 2)).sum().backward()
    Precision("mixed", ops=OpLists()).prepare(head, SGD(head.parameters()))
    assert formats([p.grad for p in head.parameters()]) == {HALF}
    assert head(torch.ones(1, 2)).dtype == HALF
    for parameter in head.parameters():
        parameter.data = parameter.data.float()
    assert head(torch.ones(1, 2).half()).dtype == FP32


def test_a_pin_that_matches_nothing_is_refused() -> None:
    model = transformer()
    precision = Precision("mixed", ops=OpLists(modules={"encoder.linear": "fp32"}))
    with pytest.raises(ConfigError) as error:
        precision.prepare(model, SGD(model.parameters()))
    assert str(error.value) == (
        "ops.modules['encoder.linear'] matches no module; the model has embed, encoder, "
        "encoder.self_attn, encoder.self_attn.out_proj, encoder.linear1, encoder.dropout, "
        "encoder.linear2, encoder.norm1, ..."
    )
    assert formats(list(model.parameters())) == {FP32}


LINE, IMAGE, SCORES = torch.rand(2, 4, 8), torch.rand(2, 4, 8, 8), torch.rand(8, 2, 5)
ROWS, CLASSES = torch.rand(4, 4), torch.tensor([0, 1, 2, 3])
# Classes of torch.nn, their arguments, and what they are called with.
LAYERS: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("CELU GELU Hardtanh LeakyReLU LogSigmoid PReLU ReLU6 Sigmoid Softplus Dropout", (), (ROWS,)),
    ("GLU Softmax LogSoftmax Softmin", (-1,), (ROWS,)),
    ("LSTM GRU RNN LSTMCell GRUCell RNNCell Linear", (4, 3), (ROWS,)),
    ("GroupNorm", (2, 4), (IMAGE,)),
    ("LayerNorm RMSNorm", (8,), (IMAGE,)),
    ("LocalResponseNorm Upsample MaxPool2d AdaptiveAvgPool2d", (2,), (IMAGE,)),
    ("ReflectionPad2d CircularPad2d", (1,), (IMAGE,)),
    ("Conv1d ConvTranspose1d", (4, 3, 2), (LINE,)),
    ("Conv2d ConvTranspose2d", (4, 3, 2), (IMAGE,)),
    ("BatchNorm1d InstanceNorm1d", (4, 1e-5, 0.1, True), (LINE,)),
    ("Bilinear", (4, 4, 3), (ROWS, ROWS)),
    ("Embedding", (5, 3), (CLASSES,)),
    ("MultiheadAttention", (8, 2), (LINE, LINE, LINE, None, False)),
    ("BCEWithLogitsLoss MSELoss HuberLoss PoissonNLLLoss CosineSimilarity", (), (ROWS, ROWS)),
    ("CrossEntropyLoss NLLLoss MultiMarginLoss", (), (ROWS, CLASSES)),
    ("TripletMarginLoss", (), (ROWS, ROWS, ROWS)),
    ("CTCLoss", (), (SCORES, torch.ones(2, 3).long(), torch.tensor([8, 8]), CLASSES[2:])),
]


def test_modules_compute_as_the_map_says() -> None:
    seen = set()
    layers = ((name, *row[1:]) for row in LAYERS for name in row[0].split())
    for name, arguments, inputs in layers:
        model = nn.Sequential(getattr(nn, name)(*arguments))
        precision = Precision("mixed", compute="native")
        (row,) = (r for r in dtype_map(precision, model) if r.module == "0")
        precision.prepare(model, SGD([nn.Parameter(torch.ones(1))]))
        floats = (isinstance(t, Tensor) and t.is_floating_point() for t in inputs)
        given = [t.half() if cast else t for t, cast in zip(inputs, floats, strict=True)]
        with Kernels() as kernels, precision.cast():
            result = model[0](*given)
        seen.add(row.compute)
        if row.compute == "float32":
            assert kernels.given() <= ({FP32, HALF} if row.kind == "Softmin" else {FP32}), row
            assert formats(result) == {FP32}, row
        elif row.compute == "float16":
            allowed = {HALF, FP32} if row.kind == "MultiheadAttention" else {HALF}
            assert kernels.given() <= allowed, row
            assert row.storage in (HALF, None), row
    assert {"float32", "float16"} <= seen


def test_every_layer_of_torch_with_weights_is_known() -> None:
    """A new layer of torch must be looked at before its weights are stored in anything but fp32."""
    own = [c for c in vars(nn).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    for cls in own:
        if "weight" in getattr(cls, "__annotations__", {}):
            module = cls.__new__(cls)
            nn.Module.__init__(module)
            module.mode, module.nonlinearity = "LSTM", "tanh"
            assert op_of(module) is not None, cls
