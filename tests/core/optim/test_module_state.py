"""What modules keep beside their weights: statistics, caches and the flags that belong to them."""

import copy
import random
from itertools import cycle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary import differing

from mpframe import Backoff, Precision, Trainer, checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.core.errors import CheckpointError
from mpframe.core.objective import supervised
from mpframe.run.resume import resume_from

MODES = [("fp32", "float16"), ("amp", "bfloat16"), ("mixed", "float16")]


@pytest.fixture(autouse=True)
def _no_sparse_tensor_is_left_to_validate():
    """By the next `torch.load` of another test, which would warn of it: copies register theirs."""
    yield
    torch._utils._validate_loaded_sparse_tensors()  # It forgets them.


class Keeping(nn.Module):
    """Keeps a buffer, which is saved or not, and plain attributes."""

    def __init__(self, run, buffer=None, persistent=True, **more):
        super().__init__()
        self.register_buffer("kept", buffer, persistent)
        self.run = run
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.run(self, x)


def growing(self, x):
    if len(self.kept) < len(x):
        self.kept = torch.cat([self.kept, x.detach()[len(self.kept) :].float()])
    return x * (1 + self.kept[: len(x)])


def codebook(self, x):
    """A moving statistic of its inputs, and a plain count of its calls."""
    self.calls += 1
    self.log.append(float(self.calls))
    self.kept.lerp_(x.detach().float().mean(0), 1 / self.calls)
    return x * (1 + self.kept)


def bank(self, x):
    """A memory bank that is not in the model's state_dict, with a plain pointer."""
    mixed = x * (1 + self.kept.mean(0))
    self.kept[self.next] = x.detach().float().mean(0)
    self.next = (self.next + 1) % len(self.kept)
    return mixed


def graph(self, x):
    x = torch.sparse.mm(self.kept, x.float().T).T
    self.kept = self.kept * 0.5
    return x


def late(self, x):
    if self.kept is None:
        self.kept = x.detach().float().mean(0)
    return x * (1 + self.kept)


def latest(self, x):
    """A statistic, and a dict that has a new number under the same name after each call."""
    self.kept.lerp_(x.detach().float().mean(0), 0.5)
    self.last["mean"] = float(x.detach().float().mean())
    return x * (1 + self.kept)


def first_values(self, x):
    """As ActNorm: its parameter begins with what the first batch gives."""
    if not self.kept:
        first = 1 / x.detach().float().std(0)
        self.scale.data = first if self.replaces else self.scale.data.copy_(first)
        self.kept.fill_(True)
    return x * self.scale


def of_all_sorts(self, x):
    self.also.add_(1)
    assert torch.equal(self.kept, self.also)
    self.ema.add_(1)
    self.cache[2], self.last, self.more = "two", x, random.random() * np.random.rand()
    self.seen.add(2)
    self.order += [2]
    return F.dropout(x)


class Frozen(dict):
    def clear(self):
        raise TypeError("frozen")


def keeping_all_sorts():
    buffer, plain = torch.zeros(4), {"last": None, "cache": {1: "one"}, "seen": {1}, "order": [1]}
    return Keeping(of_all_sorts, buffer, also=buffer, ema=buffer + 1, config=Frozen(), **plain)


KINDS = {
    "growing": lambda: Keeping(growing, torch.zeros(0, 4), persistent=False),
    "codebook": lambda: Keeping(codebook, torch.zeros(4), calls=0, log=[]),
    "latest": lambda: Keeping(latest, torch.zeros(4), last={"mean": 0.0}),
    "bank": lambda: Keeping(bank, torch.zeros(8, 4), persistent=False, next=0),
    "sparse": lambda: Keeping(graph, torch.eye(4).to_sparse()),
    "late": lambda: Keeping(late),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
}
TRACED = {
    f"first values {replaces}": lambda replaces=replaces: Keeping(
        first_values, torch.tensor(False), scale=nn.Parameter(torch.ones(4)), replaces=replaces
    )
    for replaces in (True, False)
} | {"all sorts": keeping_all_sorts}


def net(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), (KINDS | TRACED)[kind](), nn.Linear(4, 3))


def batch(rows, number=0, scale=1.0):
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(rows, 4, generator=generator) * scale
    return inputs, torch.arange(rows) % 3


def trainer_of(kind, mode="fp32", half="float16", fused=False, **more):
    model, precision = net(kind), Precision(mode, half)
    for name, buffer in more.items():
        model[1].register_buffer(name, buffer, persistent=False)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    model, optimizer = precision.prepare(model, plain, batch(3)[0])
    scaler = None if mode == "fp32" else Backoff()
    return Trainer(model, optimizer, supervised(nn.CrossEntropyLoss()), precision, scaler=scaler)


def places(model):
    """Parameters, buffers and plain attributes by name."""
    found, hidden = {}, {*vars(nn.Module()), "weight"}  # As spectral norm computes it.
    for prefix, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if name not in hidden}
        own = module._parameters | module._buffers | plain
        found |= {f"{prefix}.{name}": value for name, value in own.items()}
    return found


def dense(state):
    sparse = {n: v.to_dense() for n, v in state.items() if isinstance(v, Tensor) and v.is_sparse}
    return {**state, **sparse}


def state_of(model):
    return copy.deepcopy(dense(places(model)))


def generators():
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize("kind", KINDS | TRACED)
def test_a_dry_run_leaves_everything_as_it_was(kind) -> None:
    model = net(kind)
    before, own, drawn = state_of(model), places(model), generators()
    data = [parameter.data_ptr() for parameter in model.parameters()]
    Precision("mixed").trace(model, batch(5)[0])
    assert generators() == drawn
    assert differing(before, state_of(model)) == []
    assert all(value is own[name] for name, value in places(model).items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == data


def test_giving_lazy_layers_their_shape_is_a_dry_run() -> None:
    model = nn.Sequential(KINDS["codebook"](), nn.LazyLinear(3), nn.LazyBatchNorm1d())
    Precision("mixed").trace(model, batch(3)[0])
    assert (model[0].calls, model[0].log, model[0].kept.any()) == (0, [], False)
    assert (model[1].weight.shape, model[1].in_features) == ((3, 4), 4)
    assert model[2].running_mean.shape == (3,)


@pytest.mark.parametrize(
    ("kind", "mode", "half", "fused", "first"),
    [
        *((k, *m, True, False) for k, m in zip(KINDS, cycle(MODES))),
        *((k, *m, True, True) for k, m in zip(("bank", "growing", "late"), MODES, strict=True)),
        *((k, *m, False, first) for k, m, first in zip(KINDS, cycle(MODES), cycle([True, False]))),
    ],
)
@pytest.mark.usefixtures("waited_for")
def test_a_skipped_step_undoes_buffers_and_attributes_together(
    kind, mode, half, fused, first
) -> None:
    """A fused optimizer skips on the device: the host learns of it where it has to."""
    trainer, after = (trainer_of(kind, mode, half, fused) for _ in range(2))
    if not first:  # A dropped micro-batch leaves no trace either.
        bad = () if fused else (batch(5, scale=torch.inf),)
        trainer.train_step(batch(3), *bad)
    before = state_of(trainer.model)
    trainer.train_step(batch(5, scale=torch.inf))
    assert differing(before, state_of(trainer.model)) == []
    for number, rows in ((0, 3), (1, 6))[first:]:
        after.train_step(batch(rows, number))
    trainer.train_step(batch(6, 1))
    assert differing(state_of(trainer.model), state_of(after.model)) == []


@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_exact(kind, tmp_path) -> None:
    whole, first, resumed = (trainer_of(kind) for _ in range(3))
    given = [batch(3 + number % 4, number) for number in range(6)]
    for own in given:
        whole.train_step(own)
    for own in given[:3]:
        first.train_step(own)
    resumed.train_step(given[5])  # What it moves is put back.
    state = {"trainer": first.state_dict(), "rng": checkpoint.rng_state()}
    checkpoint.save(tmp_path, Snapshot(3, state).to_cpu())
    resume_from(resumed, "auto", tmp_path, "")
    for own in given[3:]:
        resumed.train_step(own)
    own, other = (dense(trainer.weights()) for trainer in (whole, resumed))
    assert differing(own, other) == []
    own, other = (state_of(trainer.model) for trainer in (whole, resumed))
    own["1.log"] = other["1.log"] = None  # A list is no number: it is not resumed.
    assert differing(own, other) == []


def test_what_training_left_alone_is_not_saved_and_is_as_it_was_after_a_skip() -> None:
    """Also if it cannot be written, as one that is expanded."""
    odd = {"mask": torch.full((4,), torch.inf), "nan": torch.full((1,), torch.nan).expand(4)}
    odd["graph"] = torch.eye(4).to_sparse()
    trainer = trainer_of("batch norm", "mixed", **odd)
    for scale in (1.0, torch.inf):
        trainer.train_step(batch(3, scale=scale))
        assert "1.mask" not in trainer.state_dict()["extra_state"]
        own = dict(trainer.model[1].named_buffers())
        assert differing(dense({name: own[name] for name in odd}), dense(odd)) == []


def test_a_checkpoint_of_anybody_sets_nothing_else() -> None:
    trainer = trainer_of("bank")
    rows = (
        *(("1.other", torch.zeros(3)), ("1.kept", 3), ("1.next", torch.zeros(3))),
        *(("1.next", "three"), ("1._buffers", None), ("1.training", False), ("1.forward", 1)),
    )
    for name, value in rows:
        text = f"extra_state: {name!r} in the checkpoint is no buffer or number of the model"
        with pytest.raises(CheckpointError, match=text):
            trainer.load_state_dict({**trainer.state_dict(), "extra_state": {name: value}})
