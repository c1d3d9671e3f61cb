"""The dtype map says what is done; a pin is for one module alone; a run traces its first batch."""

import inspect
import logging
import re
import signal
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fixtures import Log, Patch, refused
from in_process import composed, texts, train
from planted import Foreign
from torch import Tensor, nn
from torch.optim import SGD
from vocabulary import HALVES, Kernels, differing, formats

from mpframe import OpLists, Precision
from mpframe.cli.restored import rebuilt
from mpframe.config.command_line import check_config
from mpframe.core.errors import ConfigError, RunInterrupted
from mpframe.precision.storage import op_of
from mpframe.tracking.dtype_map import as_table, describe, dtype_map, fold
from mpframe.tracking.tags import Tag
from mpframe.training.trainer import Trainer
from mpframe.workloads.gan import discriminator_objective, generator_objective

FP32, HALF = torch.float32, torch.float16


def lists(name: str = "default", pins: dict[str, str] | None = None) -> OpLists:
    return replace(OpLists.named(name), modules=pins or {})


def test_the_table() -> None:
    class Own(nn.Linear): ...

    class Weight(nn.ParameterList): ...

    parts = {"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "act": nn.ReLU()}
    parts |= {"soft": nn.Softmax(1), "head": nn.Linear(2, 2), "sub": Own(2, 2)}
    model = nn.Sequential(OrderedDict(parts, own=Weight([torch.ones(2)])))
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
    uncast = ("fp32", "fast", "dtype.mode=fp32"), ("mixed", "none", "ops=none: no casts")
    for mode, name, why in uncast:
        (row,) = dtype_map(Precision(mode, ops=OpLists.named(name)), model[:1])
        assert row.why == why


def blocks(count: int) -> nn.Sequential:
    parts = (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(count))
    return nn.Sequential(*parts)


def test_equal_rows_of_numbered_modules_are_folded_in_the_log_and_whole_in_tensorboard(
    tmp_path: Path, caplog: Log
) -> None:
    model = nn.ModuleDict({"layers": blocks(12), "heads": nn.ModuleList(blocks(4)[0][::2])})
    rows = dtype_map(Precision("mixed", ops=lists(pins={"layers.5.0": "fp32"})), model)
    found = {row.module: row.why for row in fold(rows)}
    assert found == {
        "layers.0-4,6-11.0,2": "linear in ops.allow", "layers.0-11.1": "relu in ops.infer",
        "layers.5.0": "ops.modules['layers.5.0']=fp32", "layers.5.2": "linear in ops.allow",
        "heads.0-1": "linear in ops.allow",
    }  # fmt: skip
    assert fold([]) == []
    caplog.set_level(logging.INFO)
    own = ("model=own", "model._target_=planted.scattered", "+model.layers=3", "+model.gain=1")
    train(tmp_path, *own, "dtype=mixed", "trainer.max_steps=1")
    (shown,) = (text for text in caplog.messages if text.startswith("module "))
    whole = texts(tmp_path, Tag.TEXT_DTYPE_MAP)[0][1]
    for text, names in ((shown, ["0,2,4"]), (whole, ["0", "2", "4"])):
        assert re.findall(r"^layers\.([\d,]+) +Linear ", text, re.M) == names


PINNED = {"head": "fp32", "encoder": "half", "norm": "half"}


@pytest.mark.parametrize(
    ("mode", "name", "pins", "half"),
    [
        ("mixed", "fast", PINNED, "bfloat16"),
        ("mixed", "fp32_norms", {"head.0": "half"}, "float16"),
        ("mixed", "none", PINNED, "float16"),
        ("amp", "default", PINNED, "bfloat16"),
        ("fp32", "fast", PINNED, "float16"),
    ],
)
def test_storage_is_as_the_map_says_and_fp32_beside_statistics(
    mode: str, name: str, pins: Any, half: str
) -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3), nn.Softmax(-1))
    norm = nn.BatchNorm1d(8).half()
    parts = {"embed": nn.Embedding(7, 8), "encoder": encoder, "norm": norm, "head": head}
    model, precision = nn.ModuleDict(parts), Precision(mode, half, ops=lists(name, pins))
    before = dtype_map(precision, model)
    rows = {row.module: row.storage for row in before}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    precision.prepare(model, SGD(model.parameters()))
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    for path, module in model.named_modules():
        assert formats(list(module.parameters(recurse=False))) <= {rows.get(path)}
    assert dtype_map(precision, model) == before
    of_norm = {HALF} if name == "none" else {FP32}
    assert formats([*norm.parameters(), *norm.buffers()]) == of_norm


def test_a_pin_that_matches_nothing_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    precision = Precision("mixed", ops=OpLists(modules={"encoder.linear": "fp32"}))
    assert refused(ConfigError, precision.prepare, model, SGD(model.parameters())) == (
        "ops.modules['encoder.linear'] matches no module; the model has 0, 1, 2, 3, 4, 5, 6, 7, ..."
    )


def test_the_op_of_every_layer_of_torch_with_weights_is_known() -> None:
    """A new layer of torch must be looked at before its weights are stored in anything but fp32."""
    ops = {}
    for name, cls in vars(nn).items():
        if inspect.isclass(cls) and issubclass(cls, nn.Module):
            nn.Module.__init__(module := object.__new__(cls))
            module.mode, module.nonlinearity = "LSTM", "tanh"
            ops[name] = op_of(module)
            assert ops[name] or "weight" not in getattr(cls, "__annotations__", {}), name
    named = ("BCELoss", "RNNCell", "Softmin", "ZeroPad2d", "Transformer")
    of_named = ["binary_cross_entropy", "rnn_tanh_cell", "softmax", "pad", None]
    assert [ops[name] for name in named] == of_named


X = torch.rand(2, 4)


def pinned(model: nn.Module, pins: dict[str, str], *mode: str, **options: Any) -> Precision:
    """The precision that a model is prepared for."""
    precision = Precision(*(mode or ("amp",)), ops=lists(pins=pins), **options)
    precision.prepare(model, SGD(model.parameters()))
    return precision


def small() -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("modules", "in_fp32", "mode", "half"),
    [
        ({}, set(), "mixed", "float16"),
        ({"1": "fp32"}, {"1.0", "1.2"}, "amp", "float16"),
        ({"1.*": "fp32"}, {"1.0", "1.2"}, "mixed", "bfloat16"),
        ({"1": "fp32", "1.0": "half"}, {"1.2"}, "amp", "bfloat16"),
        ({"1.0": "half", "1": "fp32"}, {"1.0", "1.2"}, "mixed", "float16"),
        ({"1": "half"}, set(), "mixed", "float16"),
        ({"*": "fp32", "2": "half"}, {"0", "1.0", "1.2"}, "amp", "bfloat16"),
    ],
)
def test_what_computes_where(modules: Any, in_fp32: set[str], mode: str, half: str) -> None:
    model = small()
    precision = pinned(model, modules, mode, half, compute="native")
    norms: list[torch.dtype] = []
    model[1][1].register_forward_hook(lambda _, __, result: norms.append(result.dtype))
    with Kernels() as kernels, precision.cast():
        model(X)
    products = [k.given for k in kernels.ran if k.name in ("addmm", "mm")]
    names = ("0", "1.0", "1.2", "2")
    assert products == [{FP32 if name in in_fp32 else HALVES[half]} for name in names]
    assert norms == [HALVES[half] if modules.get("1") == "half" else FP32]


def test_an_exception_inside_or_before_leaves_the_pin() -> None:
    for before in (False, True):
        model = small()
        precision = pinned(model, {"1": "fp32"})
        failing, fail = model[1] if before else model[1][2], Mock(side_effect=ValueError("here"))
        failing.register_forward_pre_hook(fail, prepend=before)
        with precision.cast():
            with pytest.raises(ValueError, match="here"):
                model(X)
            assert model[2](X).dtype == HALF
        with precision.cast():
            assert model[2](X).dtype == HALF


def test_outside_a_cast_a_pin_does_nothing_and_inside_it_casts_keyword_and_nested_inputs() -> None:
    """It hooks once; no other inputs are cast."""
    net = small()
    pinned(net, {"1": "half"}).prepare(net, SGD(net.parameters()))
    assert (net(X).dtype, len(net[1]._forward_pre_hooks)) == (FP32, 1)

    class Takes(nn.Module):
        def forward(self, pair: Any, *, options: Any) -> Any:
            return [pair[0].dtype, pair[1].dtype, options["x"].dtype, options["n"]]

    model = nn.ModuleDict({"takes": Takes(), "weight": nn.Linear(1, 1)})
    with pinned(model, {"takes": "half"}).cast():
        found = model["takes"]((X, X.double()), options={"x": X, "n": 3})
    assert found == [HALF, torch.float64, HALF, 3]


def test_attached_to_be_evaluated_in_another_mode() -> None:
    """Pins of both count, each in its own blocks; a recurrent layer takes half between them."""
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "rnn": nn.LSTM(4, 3), "last": nn.Linear(3, 2)})
    training = pinned(model, {"last": "fp32"})
    evaluating = Precision("amp", "bfloat16", ops=lists(pins={"first": "fp32"}))
    evaluating.attach(model)

    def run(precision: Precision) -> list[torch.dtype]:
        with precision.cast():
            first: Tensor = model["first"](X)
            hidden, _ = model["rnn"](first)
            return [first.dtype, hidden.dtype, model["last"](hidden).dtype]

    assert run(training) == [HALF, HALF, FP32]
    assert run(evaluating) == [FP32, torch.bfloat16, torch.bfloat16]
    assert formats(list(model.parameters())) == {FP32}


FOREIGN = "model._target_=planted.Foreign"


def built(*words: str) -> Trainer:
    return rebuilt(check_config(composed("dtype=mixed", *words)))[0]


def half_weights(trainer: Trainer) -> list[str]:
    return [name for name, p in trainer.model.named_parameters() if p.dtype == torch.float16]


def test_weights_of_foreign_layers_are_half_and_the_run_is_as_it_would_be() -> None:
    """Initial values, buffers and the numbers drawn next are those of a mode without a trace."""
    traced = built(FOREIGN)
    assert half_weights(traced) == ["first.weight", "first.bias", "head.weight", "head.bias"]
    number = torch.rand(())
    weights = built(FOREIGN, "dtype.mode=amp").weights()
    assert torch.equal(torch.rand(()), number)
    assert differing(traced.weights(), weights) == []
    assert describe(traced.precision, traced.model).endswith("""
idle     Product      float32  -             no op of torch.nn: fp32 weights, never called
head     Product      float16  float16       addmm in ops.allow
float32: 31.7 % of 3,530 weights
  29.9 %: no op of torch.nn: fp32 weights, never called: idle; half with ops.modules['idle']=half
  1.81 %: batch_norm is in no list: norm""")


def test_every_loss_is_traced(monkeypatch: Patch) -> None:
    """A generator's loss may call other layers than the discriminator's."""
    traced: list[Any] = []
    monkeypatch.setattr(Precision, "trace", lambda _, model, example: traced.append(example))
    built("experiment=digits_gan")
    assert [own.func for own in traced] == [discriminator_objective, generator_objective]


def test_a_first_batch_that_fails_is_left_to_the_first_step_but_a_signal_ends_it(
    caplog: Log, monkeypatch: Patch
) -> None:
    """There a guard knows the batch; here the weights go by their classes, and that is said."""
    for error in (ValueError, SystemExit):
        caplog.clear()
        fails = Mock(side_effect=error("this model takes no images"))
        monkeypatch.setattr(Foreign, "forward", fails)
        assert half_weights(built(FOREIGN)) == []
        assert caplog.messages == [
            "warning: the first batch could not be traced (this model takes no images): if it "
            "trains all the same, weights of classes that are not torch.nn's stay fp32"
        ]
    monkeypatch.setattr(Foreign, "forward", Mock(side_effect=RunInterrupted(signal.SIGTERM)))
    with pytest.raises(RunInterrupted):
        built(FOREIGN)
