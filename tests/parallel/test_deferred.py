"""A model that is made without values, and filled later, is the model that would have been made."""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Log
from in_process import composed, train
from ranked import OWN, SHARDED, Net, parts
from ranks import Ranks
from safetensors.torch import save_file
from torch import Tensor, nn

from mpframe import Precision, checkpoint
from mpframe.checkpoint.init_from import fit_weights
from mpframe.config.command_line import check_config
from mpframe.core.comm import is_sharded
from mpframe.core.objective import supervised
from mpframe.run.sharding import build_deferred, trace_deferred
from mpframe.training.parallel import deferred
from mpframe.training.parallel.deferred import Deferred


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "LARGE", 50)


class Inits(nn.Module):
    """Whatever constructors do with weights: in place, by views, by values, and beside autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.weight, std=0.02)
        with torch.no_grad():
            self.b.weight.mul_(1 / self.b.weight.std())
            self.b.weight[3] = 7
            self.b.weight.t().mul_(2)
            if self.a.weight[0, 0] > 0:
                self.a.weight.neg_()
            self.first = self.a.weight.tolist()[0]
        self.same = nn.Parameter(self.a.weight.view(-1))
        self.register_buffer("mask", torch.ones(40, 40).tril())
        self.plain, self.listed = torch.randn(30, 30), [torch.randn(30, 30)]
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(50, 50), 0.3))
        self.normal = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.lasting = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        self.own = nn.Parameter(torch.empty(9, 30))
        nn.init.kaiming_normal_(self.own, generator=torch.Generator().manual_seed(5))
        self.own.no_decay = True


class Written(nn.Module):
    """Weights that other memory is written to, or put in the place of."""

    def __init__(self) -> None:
        super().__init__()
        values = np.random.randn(20, 20).astype("f")
        self.array = nn.Parameter(torch.from_numpy(values))
        self.copied = nn.Parameter(torch.randn(20, 20))
        self.copied.data.copy_(torch.from_numpy(values))
        self.large, self.real = nn.Linear(20, 20), nn.Linear(20, 20)
        self.large.weight.data = torch.randn(20, 20)
        self.real.weight.data = torch.ones(3)
        self.real.weight.data.mul_(4)
        self.written = nn.Parameter(torch.ones(20, 20))
        self.written.data.bernoulli_(torch.full((20, 20), 0.3)).mul_(2)  # With values at once.
        self.sum = self.written.sum().item()
        source, target = torch.zeros(3), torch.zeros(400)
        self.late = nn.Parameter(torch.zeros(400))
        self.late.data[:3] = source
        source.add_(1)  # It was copied before.
        target.copy_(self.large.weight.data.flatten())
        self.target = nn.Parameter(target)


def init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(30, 30),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 64, 3), nn.ConvTranspose2d(64, 4, 3)),
    "embedding": lambda: nn.Embedding(30, 30, padding_idx=2),
    "lstm": lambda: nn.LSTM(40, 50, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(32, 4, kdim=16),
    "encoder": lambda: nn.TransformerEncoder(  # It copies a layer.
        nn.TransformerEncoderLayer(32, 4, 64), 2, enable_nested_tensor=False
    ),
    "apply": lambda: nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).apply(init),
    "inits": Inits,
    "written": Written,
    **{name: lambda name=name: parts(name)[0] for name in ("tied", "gpt", "resnet18")},
}  # fmt: skip


def seeded(make: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """A model, and what the generators draw after it."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = make()
    return model, [torch.rand(()).item(), random.random(), np.random.rand()]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, and tensors in plain attributes and in lists, by name."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        homes = module._parameters, module._buffers, vars(module)
        listed = {f"{k}.0": v[0] for k, v in vars(module).items() if isinstance(v, list) and v}
        for home in (*homes, listed):
            found |= {f"{path}.{n}": t for n, t in home.items() if isinstance(t, Tensor)}
    return found


@pytest.mark.parametrize("name", MODELS)
def test_filled_values_are_those_of_an_ordinary_construction(name: str) -> None:
    (ordinary, after), values = seeded(MODELS[name]), Deferred()
    model, after_deferred = seeded(lambda: values.construct(MODELS[name]))
    assert after_deferred == after
    assert any(map(values.lacks_values, tensors(model).values()))
    values.take_values(model)
    assert all(map(values.lacks_values, model.parameters()))
    replaced = values.fill(model)
    assert list(map(id, replaced.values())) == list(map(id, model.parameters()))
    first, second = tensors(ordinary), tensors(model)
    assert first.keys() == second.keys()
    for path, tensor in first.items():
        other = second[path]
        assert type(other) is type(tensor), path
        assert torch.equal(other, tensor), path
        assert (other.stride(), other.requires_grad) == (tensor.stride(), tensor.requires_grad)
        assert vars(other) == vars(tensor), path
        same = [[n for n in of if of[n] is of[path]] for of in (first, second)]
        assert same[0] == same[1]  # Tied as before.


@pytest.mark.parametrize("name", ["gpt", "resnet18", "tied", "net"])
def test_a_trace_on_shapes_sees_what_a_trace_sees(name: str) -> None:
    """The control flow may depend on the batch (net)."""
    model, data, loss = parts(name)
    example = partial(
        supervised(loss), batch=[torch.stack(x) for x in zip(*[data[0]] * 4, strict=True)]
    )
    values = Deferred()
    late = values.construct(lambda: parts(name)[0])
    values.take_values(late)
    seen = []
    for one in (model, late):
        names = {weight: path for path, weight in one.named_parameters()}
        (precision := Precision("mixed")).trace(one, example)
        uses = precision.uses(one)
        seen.append(({names[weight]: ops for weight, ops in uses.by_weight.items()}, uses.called))
    assert seen[0] == seen[1]
    assert all(map(values.lacks_values, late.parameters()))


class Chooses(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if self.first.weight.sum() > -99 else inputs


def test_a_model_that_needs_its_values_for_the_trace_gets_all_of_them(caplog: Log) -> None:
    values, precision = Deferred(), Precision("mixed")
    model = values.construct(lambda: Chooses(norm=None, whole=True))
    values.take_values(model)
    trace_deferred(precision, model, torch.ones(2, 8), values)
    assert not any(map(values.lacks_values, model.parameters()))
    assert precision.uses(model).by_weight.keys() == set(model.parameters())
    said = "warning: trainer.parallel=fsdp: each rank begins with the whole model, because the "
    assert said + "objective needs its values: " in caplog.text


class ByNumpy(nn.Linear):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.mean = self.weight.detach().numpy().mean()


def test_a_constructor_that_fails_without_values_is_called_again_with_them(caplog: Log) -> None:
    options = ["model=own", "model._target_=test_deferred.ByNumpy", "+model.in_features=20"]
    config = check_config(composed(*options, "+model.out_features=20"))
    ordinary, after = seeded(lambda: ByNumpy(20, 20))
    built, after_deferred = seeded(lambda: build_deferred(config))
    model, values = built
    assert after_deferred == after
    assert "whole model, because its constructor needs its values: " in caplog.text
    values.fill(model)
    assert torch.equal(model.weight, ordinary.weight)
    assert model.mean == ordinary.mean
    lazy = "model=own", "model._target_=torch.nn.LazyLinear", "+model.out_features=2"
    assert build_deferred(check_config(composed(*lazy)))[1] is None  # It has its values at once.


RUN = [*OWN[:4], "model._target_=test_deferred.Deep", "trainer.max_steps=3", f"dtype={SHARDED}",
       "trainer.parallel=fsdp", "trainer.clip_norm=null", "callbacks.autopsy=null"]  # fmt: skip


class Deep(nn.Sequential):
    def __init__(self) -> None:
        inner = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)))
        super().__init__(nn.Linear(4, 32), inner, nn.LayerNorm(32), nn.Linear(32, 2))


def divided(folder: Path, weights: Path) -> Any:
    """Whether a run leaves the same without and with values at the start; parts of half weights."""
    states, sharded = [], []

    def fitting(saved: Any, model: Any, *more: Any) -> Any:
        taken = fit_weights(saved, model, *more)
        sharded.append(sorted(name for name, t in taken.weights.items() if is_sharded(t)))
        return taken

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mpframe.checkpoint.init_from.fit_weights", fitting)
        for number, large in enumerate((1, 2**40)):
            patched.setattr(deferred, "LARGE", large)
            for kind, options in (("", []), ("init", [f"init_from={weights}"])):
                train(folder / f"{number}{kind}", *RUN, *options)
                states.append(checkpoint.read(folder / f"{number}{kind}").state["trainer"])
    found = [copy.deepcopy(state["weights"]) for state in states]
    same = [
        all(torch.equal(a[n], b[n]) for n in a) for a, b in zip(found[:2], found[2:], strict=True)
    ]
    return same, torch.equal(found[0]["0.weight"], found[1]["0.weight"]), sharded


def test_ranks_train_the_model_that_they_filled_by_blocks(two: Ranks, tmp_path: Path) -> None:
    """And take only their parts of half weights from a file."""
    torch.manual_seed(1)
    half = {name: weight.half() for name, weight in Deep().state_dict().items()}
    save_file(half, tmp_path / "half.safetensors")
    expected = [True, True], False, [sorted(half), sorted(half)]
    assert two(divided, tmp_path / "run", tmp_path / "half.safetensors") == [expected] * 2
