"""The dtype map says what is done: op by op, module by module, in storage and in compute."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
    [
        ("fp32", "default", "dtype.mode=fp32"),
        ("mixed", "none", "ops=none: no casts"),
    ],
)
def test_reasons_of_modes(mode: str, name: str, words: str) -> None:
    rows = dtype_map(Precision(mode, ops=OpLists.named(name)), nn.Sequential(nn.Linear(2, 2)))
    assert [row.why for row in rows] == [words]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mode", ["fp32", "amp", "mixed"])
@pytest.mark.parametrize("name", ["default", "fast", "fp32_norms", "none"])
@pytest.mark.parametrize("modules", [{}, {"head": "fp32", "encoder": "half"}, {"head.0": "half"}])
def test_weights_are_stored_as_the_map_says(
    modules: dict[str, str], name: str, mode: str, half: str
) -> None:
    model = transformer()
    precision = Precision(mode, half, ops=lists(name, modules))
    rows = {row.module: row.storage for row in dtype_map(precision, model)}
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            assert parameter.dtype == rows[path]


def test_the_map_is_the_same_before_and_after() -> None:
    model = transformer()
    precision = Precision("mixed", ops=lists(pins={"head": "fp32"}))
    before = dtype_map(precision, model)
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert dtype_map(precision, model) == before


@pytest.mark.parametrize(
    ("mode", "name", "expected"),
    [
        ("fp32", "default", {}),
        ("amp", "default", {}),
        ("mixed", "default", {"linear1", "linear2", "self_attn", "out_proj"}),
        ("mixed", "fast", {"linear1", "linear2", "self_attn", "out_proj", "norm1", "norm2"}),
    ],
)
def test_which_weights_of_a_transformer_are_half(mode: str, name: str, expected: set[str]) -> None:
    encoder = transformer()["encoder"]  # type: ignore[index]
    precision = Precision(mode, ops=OpLists.named(name))
    precision.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    half = {
        n.split(".")[-2] if "." in n else n
        for n, p in encoder.named_parameters()
        if p.dtype == HALF
    }
    assert {n.removesuffix("_weight").removesuffix("_bias") for n in half} == set(expected)


@pytest.mark.parametrize("modules", [{"norm": "half"}, {}])
@pytest.mark.parametrize("name", ["default", "fp32_norms"])
def test_weights_beside_running_statistics_stay_fp32(name: str, modules: dict[str, str]) -> None:
    model = transformer()
    Precision("mixed", ops=lists(name, modules)).prepare(model, torch.optim.SGD(model.parameters()))
    norm = model["norm"]  # type: ignore[index]
    assert formats([norm.weight, norm.bias, norm.running_mean, norm.running_var]) == {FP32}


def test_statistics_that_arrive_in_half_are_widened() -> None:
    model = nn.BatchNorm1d(3).half()
    Precision("mixed").prepare(model, torch.optim.SGD(model.parameters()))
    assert formats([*model.parameters(), *model.buffers()]) == {FP32}


def test_without_lists_everything_is_half() -> None:
    model = transformer()
    precision = Precision("mixed", ops=OpLists.named("none"))
    precision.prepare(model, torch.optim.SGD(model.parameters()))
    assert formats([*model.parameters(), *model.buffers()]) == {HALF}
    norm = model["norm"]  # type: ignore[index]
    assert norm.num_batches_tracked.dtype == torch.int64


def test_without_lists_inputs_follow_the_weights() -> None:
    """Half in training; fp32 while an evaluation has put fp32 weights in their place."""
    model = nn.Sequential(nn.Linear(2, 2))
    Precision("mixed", ops=OpLists()).prepare(model, torch.optim.SGD(model.parameters()))
    assert model(torch.ones(1, 2)).dtype == HALF
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    assert model(torch.ones(1, 2).half()).dtype == FP32


def test_gradients_that_are_there_already_follow_their_weight() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    Precision("mixed").prepare(model, torch.optim.SGD(model.parameters()))
    assert formats([p.grad for p in model.parameters()]) == {HALF}


@pytest.mark.parametrize("pattern", ["haed", "head.7", "encoder.linear"])
def test_a_pin_that_matches_nothing_is_refused(pattern: str) -> None:
    model = transformer()
    precision = Precision("mixed", ops=OpLists(modules={pattern: "fp32"}))
    with pytest.raises(ConfigError) as error:
        precision.prepare(model, torch.optim.SGD(model.parameters()))
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
    for name in (
        "BCE",
        "BCEWithLogits",
        "L1",
        "MSE",
        "SmoothL1",
        "Huber",
        "PoissonNLL",
        "SoftMargin",
    ):
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
    lengths = torch.tensor([8, 8]), torch.tensor([2, 2])
    yield (
        lambda: nn.CTCLoss(),
        (torch.rand(8, 2, 5).log_softmax(-1), torch.ones(2, 2).long(), *lengths),
    )


CASES = [*modules_of_one_input(), *losses()]
IDS = [make().__class__.__name__ for make, _ in CASES]


@pytest.mark.parametrize(("make", "inputs"), CASES, ids=IDS)
def test_the_op_of_a_module_is_one_it_runs(make: Callable[[], nn.Module], inputs: Any) -> None:
    """Seen from outside, and with every function opened, as casts see it."""
    module, outside, inside = make(), CalledOps(), CalledOps()
    with inside, Precision("amp", ops=OpLists(infer=frozenset({"exp2"}))).cast(), outside:
        module(*inputs)
    assert op_of(module) in outside.names + inside.names


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("make", "inputs"), CASES, ids=IDS)
def test_modules_compute_as_the_map_says(
    make: Callable[[], nn.Module], inputs: Any, half: str
) -> None:
    """Prepared as in a run; what its kernels were given and what it returned."""
    model = nn.Sequential(make())
    precision = Precision("mixed", half, compute="native")
    (row,) = (r for r in dtype_map(precision, model) if r.module == "0")
    precision.prepare(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    dtype = HALVES[half]
    given = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs]
    kernels = Kernels()
    with kernels, precision.cast():
        result = model[0](*given)
    if row.compute == "float32":
        assert kernels.given() <= {FP32, dtype} if row.kind == "Softmin" else {FP32}
        assert formats(result) == {FP32}
    if row.compute == half:
        assert row.storage in (dtype, None)
        assert kernels.given() <= ({dtype, FP32} if row.kind == "MultiheadAttention" else {dtype})


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


class TestPins:
    """A pinned module computes in its format with everything inside it, and only it."""

    @staticmethod
    def ran(model: nn.Module, precision: Precision, x: Tensor) -> dict[str, set[torch.dtype]]:
        """Formats given to the products of each module."""
        found: dict[str, set[torch.dtype]] = {}
        modes = {}

        def enter(name: str) -> Any:
            def hook(*_: Any) -> None:
                modes[name] = Kernels()
                modes[name].__enter__()

            return hook

        def leave(name: str) -> Any:
            def hook(*_: Any) -> None:
                modes[name].__exit__(None, None, None)
                products = [k for k in modes[name].ran if k.name in ("addmm", "mm")]
                found[name] = {d for k in products for d in k.given}

            return hook

        handles = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_pre_hook(enter(name)))
                handles.append(module.register_forward_hook(leave(name)))
        with precision.cast():
            model(x)
        for handle in handles:
            handle.remove()
        return found

    @staticmethod
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 4))

    @pytest.mark.parametrize("mode", ["mixed", "amp"])
    @pytest.mark.parametrize("half", HALVES)
    @pytest.mark.parametrize(
        ("modules", "in_fp32"),
        [
            ({}, set()),
            ({"1": "fp32"}, {"1.0", "1.2"}),
            ({"1.*": "fp32"}, {"1.0", "1.2"}),
            ({"1": "fp32", "1.0": "half"}, {"1.2"}),
            ({"1.0": "half", "1": "fp32"}, {"1.0", "1.2"}),
            ({"*": "fp32"}, {"0", "1.0", "1.2", "2"}),
            ({"*": "fp32", "2": "half"}, {"0", "1.0", "1.2"}),
            ({"2": "fp32", "0": "fp32"}, {"0", "2"}),
        ],
    )
    def test_what_computes_where(
        self, modules: dict[str, str], in_fp32: set[str], half: str, mode: str
    ) -> None:
        model = self.model()
        ops = lists(pins=modules)
        precision = Precision(mode, half, ops=ops, compute="native")
        precision.prepare(model, torch.optim.SGD(model.parameters()))
        expected = {n: {FP32 if n in in_fp32 else HALVES[half]} for n in ("0", "1.0", "1.2", "2")}
        assert self.ran(model, precision, torch.rand(2, 4)) == expected

    def test_a_module_pinned_to_half_runs_its_norm_in_half(self) -> None:
        model = self.model()
        precision = Precision("mixed", ops=lists(pins={"1": "half"}))
        precision.prepare(model, torch.optim.SGD(model.parameters()))
        seen = []
        model[1][1].register_forward_hook(lambda m, a, result: seen.append(result.dtype))
        with precision.cast():
            model(torch.rand(2, 4))
        assert seen == [HALF]

    def test_an_exception_inside_leaves_the_pin(self) -> None:
        class Fails(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                raise ValueError("inside")

        model = nn.ModuleDict(
            {"bad": nn.Sequential(nn.Linear(4, 4), Fails()), "good": nn.Linear(4, 4)}
        )
        precision = Precision("amp", ops=lists(pins={"bad": "fp32"}))
        precision.prepare(model, torch.optim.SGD(model.parameters()))
        with precision.cast():
            with pytest.raises(ValueError, match="inside"):
                model["bad"](torch.rand(2, 4))
            assert model["good"](torch.rand(2, 4)).dtype == HALF
        with precision.cast():
            assert model["good"](torch.rand(2, 4)).dtype == HALF

    def test_a_hook_that_fails_before_the_pin_was_entered(self) -> None:
        model = self.model()
        precision = Precision("amp", ops=lists(pins={"1": "fp32"}))
        precision.prepare(model, torch.optim.SGD(model.parameters()))

        def fail(*_: Any) -> None:
            raise ValueError("before")

        handle = model[1].register_forward_pre_hook(fail, prepend=True)
        with precision.cast(), pytest.raises(ValueError, match="before"):
            model(torch.rand(2, 4))
        handle.remove()
        with precision.cast():
            assert model(torch.rand(2, 4)).dtype == HALF

    def test_outside_a_cast_a_pin_does_nothing(self) -> None:
        model = self.model()
        precision = Precision("amp", ops=lists(pins={"1": "half"}))
        precision.prepare(model, torch.optim.SGD(model.parameters()))
        assert model(torch.rand(2, 4)).dtype == FP32

    def test_keyword_and_nested_inputs_are_cast_and_others_are_not(self) -> None:
        class Takes(nn.Module):
            def forward(self, pair: Any, *, options: Any) -> Any:
                return [pair[0].dtype, pair[1].dtype, options["x"].dtype, options["n"]]

        model = nn.ModuleDict({"takes": Takes()})
        precision = Precision(
            "amp", ops=OpLists(allow=frozenset({"mm"}), modules={"takes": "half"})
        )
        precision.prepare(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
        x = torch.ones(2)
        with precision.cast():
            found = model["takes"]((x, x.double()), options={"x": x, "n": 3})
        assert found == [HALF, torch.float64, HALF, 3]

    def test_preparing_twice_hooks_once(self) -> None:
        model = self.model()
        precision = Precision("mixed", ops=lists(pins={"1": "fp32"}))
        for _ in range(2):
            precision.prepare(model, torch.optim.SGD(model.parameters()))
        assert len(model[1]._forward_pre_hooks) == 1

    def test_attached_to_be_evaluated_in_another_mode(self) -> None:
        """Pins of both count, each in its own blocks; a recurrent layer takes half between them."""
        model = nn.ModuleDict(
            {"first": nn.Linear(4, 4), "rnn": nn.LSTM(4, 3), "last": nn.Linear(3, 2)}
        )
        training = Precision("amp", ops=lists(pins={"last": "fp32"}))
        training.prepare(model, torch.optim.SGD(model.parameters()))
        evaluating = Precision("amp", "bfloat16", ops=lists(pins={"first": "fp32"}))
        evaluating.attach(model)

        def run(precision: Precision) -> list[torch.dtype]:
            with precision.cast():
                first = model["first"](torch.rand(2, 4))
                hidden, _ = model["rnn"](first)
                return [first.dtype, hidden.dtype, model["last"](hidden).dtype]

        assert run(training) == [HALF, HALF, FP32]
        assert run(evaluating) == [FP32, torch.bfloat16, torch.bfloat16]
        assert formats(list(model.parameters())) == {FP32}

    @pytest.mark.parametrize("half", HALVES)
    def test_fp32_norms_in_an_otherwise_half_model(self, half: str) -> None:
        """The rung between all half and the lists: ops=none with BatchNorm pinned to fp32."""
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3))
        precision = Precision("mixed", half, ops=OpLists(modules={"1": "fp32"}))
        precision.prepare(model, torch.optim.SGD(model.parameters()))
        assert formats(list(model[1].parameters())) == {FP32}
        seen: list[Any] = []
        model[1].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
        with precision.cast():
            result = model(torch.rand(2, 1, 8, 8))
        result.float().sum().backward()
        assert seen == [FP32]
        assert result.dtype == HALVES[half]
        assert formats([p.grad for p in model[0].parameters()]) == {HALVES[half]}
