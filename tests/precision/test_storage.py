"""Which weights `mixed` stores in half: those that only half ops read, as a traced step shows."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from vocabulary import inside, same_bits, tensors

from mpframe import OpLists, Precision
from mpframe.core.errors import ConfigError
from mpframe.tracking.dtype_map import describe

FP32 = torch.float32
ROWS, LINE, IMAGE = torch.randn(6, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 6, 6)
SQUARE, WORDS = torch.randn(4, 4), torch.tensor([[0, 3, 3], [1, 2, 6]])


class Reads(nn.Module):
    """Parts, of which a shape is a weight's, and a function of the module and its inputs."""

    def __init__(self, read, **parts) -> None:
        super().__init__()
        self.read = read
        for name, part in parts.items():
            weight = isinstance(part, tuple)
            setattr(self, name, nn.Parameter(torch.randn(part) / 2) if weight else part)

    def forward(self, *inputs, **named):
        return self.read(self, *inputs, **named)


def sliced(m, x):
    experts = zip(torch.arange(3), x.chunk(3), strict=True)
    hidden = [(n, F.relu(F.linear(rows, m.up[n]) + m.shift[n])) for n, rows in experts]
    return torch.cat([rows @ m.down[n] for n, rows in hidden])


def standardized(m, x):
    mean, variance = (f((1, 2, 3), keepdim=True) for f in (m.weight.mean, m.weight.var))
    return F.conv2d(x, (m.weight - mean) / (variance + 1e-5).sqrt(), m.bias)


def tied(m, words):
    hidden = F.embedding(words, m.embedding)
    return F.linear(hidden, m.embedding) + F.linear(hidden, m.head)


def looks_at_shapes(m, x):
    x = x.to(m.weight) + torch.zeros_like(m.weight).sum() + m.weight.new_zeros(())
    return x.view_as(m.weight) @ m.weight.T.mT.data.requires_grad_()


def written(m, x):
    weight = torch.zeros(4, 4)
    weight[:] = m.weight
    return x @ weight


def addmm(inputs=4, outputs=4):
    """Hugging Face's linear layer of GPT-2: a class of its own around addmm."""
    run = lambda m, x: torch.addmm(m.bias, x, m.weight)  # noqa: E731
    return Reads(run, weight=(inputs, outputs), bias=(outputs,))


def read_by_linear(read):
    layer = nn.Linear(4, 4, bias=False)
    layer.forward = partial(read, layer)
    return layer


def borrowing():
    return Reads(lambda m, x: F.linear(x, m.lender.weight), lender=Reads(None, weight=(3, 4)))


def listed():
    run = lambda m, x: torch.einsum("ni,io->no", x, m.own[0]) * m.own[1]  # noqa: E731
    return Reads(run, own=nn.ParameterList([torch.randn(4, 4), torch.randn(4)]))


def joined():
    run = lambda m, x: F.linear(x, torch.cat([m.q, m.k.t().contiguous(), m.v.clone()]))  # noqa: E731
    return Reads(run, q=(4, 4), k=(4, 4), v=(4, 4))


def twice(m, x):
    return F.linear(F.linear(x, m.weight, m.bias) * m.bias, m.weight, m.bias)


def attention():
    run = lambda m, x: m.own(x, x, x, need_weights=False)[0]  # noqa: E731
    return Reads(run, own=nn.MultiheadAttention(4, 2))


def complex_product(made_complex):
    """A Fourier neural operator. No input of such a product is cast."""

    def multiply(m, x):
        frequencies = torch.fft.rfft(x.float().view(-1, 4, 1))
        return torch.einsum("bix,iox->box", frequencies, made_complex(m.w)).real.flatten(1)

    return nn.Sequential(nn.Linear(4, 4), Reads(multiply, w=(4, 4, 1, 2)))


LINEAR = "0.weight 0.bias"
ATTENTION = "own.in_proj_weight own.in_proj_bias own.out_proj.weight own.out_proj.bias"
CASES = {
    "addmm": (lambda: addmm(4, 3), ROWS, "weight bias"),
    "experts": (lambda: Reads(sliced, up=(3, 8, 4), shift=(3, 8), down=(3, 8, 4)), ROWS, "up down"),
    "conv": (lambda: nn.Conv2d(3, 2, 3), IMAGE, "weight bias"),
    "standardized": (lambda: Reads(standardized, weight=(2, 3, 3, 3), bias=(2,)), IMAGE, "bias"),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), ROWS, "bias"),
    "borrowing": (borrowing, ROWS, "lender.weight"),
    "listed": (listed, ROWS, "own.0"),
    "joined": (joined, ROWS, "q k v"),
    "twice": (lambda: Reads(twice, weight=(4, 4), bias=(4,)), ROWS, "weight"),
    "tied": (lambda: Reads(tied, embedding=(7, 4), head=(7, 4)), WORDS, "head"),
    "shapes": (lambda: Reads(looks_at_shapes, weight=(4, 4)), SQUARE, "weight"),
    "multiplied": (lambda: read_by_linear(lambda m, x: x @ m.weight.clone().mul_(0.1)), SQUARE, ""),
    "written": (lambda: read_by_linear(written), SQUARE, ""),
    "attention": (attention, LINE, ATTENTION),
    "lstm": (lambda: nn.LSTM(4, 3), LINE, "weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0"),
    "layer_norm": (lambda: nn.LayerNorm(4), ROWS, ""),
    "prelu": (lambda: nn.PReLU(), ROWS, "weight"),
    "complex view": (lambda: complex_product(torch.view_as_complex), ROWS, LINEAR),
    "complex of 2": (lambda: complex_product(lambda w: torch.complex(*w.unbind(-1))), ROWS, LINEAR),
    "complex of 1": (lambda: complex_product(lambda w: w[..., 0].cfloat()), ROWS, LINEAR),
    "statistics": (lambda: nn.BatchNorm1d(4), ROWS, ""),
}


def prepare(model, example=None, mode="mixed", **options):
    precision = Precision(mode, **options)
    _, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), example)
    return precision, optimizer


def in_half(model):
    return " ".join(name for name, p in model.named_parameters() if p.dtype != FP32)


def gradients(model, precision, example):
    torch.manual_seed(1)
    out = inside(precision, model)(example)
    (tensors(out)[0].float().sin().sum() * 8).backward()
    return [p.grad.float() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("half", "compute"), [("float16", "emulated"), ("bfloat16", "native")])
@pytest.mark.parametrize("name", CASES)
def test_half_is_what_only_half_ops_read(name, half, compute) -> None:
    """And no number moves for it: the gradients are those of fp32 weights cast op by op."""
    make, example, expected = CASES[name]
    found = []
    for mode in ("amp", "mixed"):
        torch.manual_seed(0)
        model = make()
        precision, _ = prepare(model, example, mode, half=half, compute=compute)
        found.append(gradients(model, precision, example))
    assert in_half(model) == expected
    assert same_bits(*found)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_what_no_trace_reached_goes_by_its_class_and_a_compiled_model_is_traced() -> None:
    untraced = nn.Sequential(nn.Linear(4, 4), addmm())
    prepare(untraced)
    assert in_half(untraced) == LINEAR
    model = Reads(lambda m, x: m.taken(x), taken=addmm(), left_out=untraced.float())
    prepare(model, ROWS)
    assert in_half(model) == "taken.weight taken.bias left_out.0.weight left_out.0.bias"
    prepare(torch.compile(untraced.float(), backend="aot_eager"), ROWS)
    assert in_half(untraced) == f"{LINEAR} 1.weight 1.bias"
    script = torch.jit.script(nn.BatchNorm1d(4))  # It takes no hooks, and its ops are not seen.
    model = nn.Sequential(addmm(), script)
    precision, _ = prepare(model, ROWS)
    assert in_half(model) == LINEAR
    assert torch.equal(script.running_mean, torch.zeros(4))
    assert "never called" not in describe(precision, model)


@pytest.mark.parametrize("op", ["batch_norm", "instance_norm"])
def test_weights_beside_statistics_stay_fp32_in_any_list(op) -> None:
    read = lambda m, x: getattr(F, op)(x, torch.zeros(3), torch.ones(3), m.weight)  # noqa: E731
    model = Reads(read, weight=(3,))
    precision, _ = prepare(model, IMAGE, ops=OpLists.named().moved({op: "allow"}))
    reads = set().union(*map(precision.uses(model).by_weight.get, model.parameters()))
    assert [read.op for read in reads] == [op]
    assert in_half(model) == ""


def test_what_an_example_may_be() -> None:
    seen, by_hand = [], lambda model: model(ROWS, y=LINE)
    for example in (ROWS, (ROWS, LINE), {"y": LINE, "x": ROWS}, by_hand):
        prepare(Reads(lambda _, x, y=None: seen.append((x, y)), w=(4,)), example)
    assert seen == [(ROWS, None)] + [(ROWS, LINE)] * 3


def test_examples_are_put_together_and_optimizers_share_a_trace() -> None:
    """As the losses of a GAN, each of which calls another part."""
    calls = []

    def run(m, x, part):
        calls.append(part)
        return getattr(m, part)(x)

    model = Reads(run, one=addmm(), two=addmm())
    precision = Precision("mixed")
    for name in ("one", "two"):
        precision.trace(model, (ROWS, name))
    for part in (model.one, model.two):
        precision.prepare(model, torch.optim.SGD(part.parameters()), (ROWS, "one"))
    assert in_half(model) == "one.weight one.bias two.weight two.bias"
    assert calls == ["one", "two"]


def test_an_op_computes_under_the_pin_of_its_caller_and_the_weights_own_pin_comes_first() -> None:
    layer, reads = nn.Linear(4, 4, bias=False), Reads(lambda m, x, weight: F.linear(x, weight))
    elsewhere = Reads(lambda m, x: m.reads(m.layer(x), m.layer.weight), layer=layer, reads=reads)
    own, pins = nn.Sequential(addmm(), nn.LayerNorm(4), listed()), {"1": "half", "2": "half"}
    for model, modules, expected in (
        (nn.Sequential(borrowing(), addmm(3, 4)), {"0": "fp32"}, "1.weight 1.bias"),
        (elsewhere, {"reads": "fp32"}, ""),
        # Also where it is only the storage that is pinned: `mul` follows its inputs.
        (own, {"0": "fp32"} | pins, "1.weight 1.bias 2.own.0 2.own.1"),
    ):
        prepare(model, ROWS, ops=replace(OpLists.named(), modules=modules))
        assert in_half(model) == expected


def test_a_model_that_fails_is_left_as_it_was() -> None:
    def fails(m, x):
        m.norm(x)
        raise ValueError("inside")

    model = Reads(fails, norm=nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="inside"):
        prepare(model, ROWS)
    assert torch.equal(model.norm.running_mean, torch.zeros(4))
    assert not any(module._forward_hooks for module in model.modules())
    for mode in ("fp32", "amp"):  # They store fp32, and do not run the model.
        prepare(model, ROWS, mode)


@pytest.mark.parametrize("mode", ["fp32", "mixed", "amp"])
def test_lazy_layers_need_their_shapes_from_an_example_or_a_first_run(mode) -> None:
    """But not in fp32."""

    def lazy():
        own = nn.LazyLinear(3), nn.LazyBatchNorm1d()
        return nn.Sequential(nn.Linear(4, 4), *own, nn.Dropout())

    text = r"^model: parameter '1\.weight' is lazy, it has no shape before the first forward pass; "
    for example in (None, ROWS):
        model = lazy()
        if example is None and mode != "fp32":
            with pytest.raises(ConfigError, match=text):
                prepare(model, mode=mode)
            assert (model[0].weight.dtype, *model[0]._forward_pre_hooks) == (FP32,)
            model(ROWS)
        precision, optimizer = prepare(model, example, mode)
        if example is not None:
            assert model[1].weight.shape == (3, 4)
            assert (model[2].running_mean.tolist(), model[2].num_batches_tracked) == ([0] * 3, 0)
            assert all(module.training for module in model.modules())
            assert in_half(model) == (f"{LINEAR} 1.weight 1.bias" if mode == "mixed" else "")
        gradients(model, precision, ROWS)
        before = optimizer.master_of(model[1].weight).clone()
        optimizer.step()
        assert not torch.equal(optimizer.master_of(model[1].weight), before)
