"""What modules keep beside their weights: statistics, caches and the flags that belong to them.

A dry run leaves all of it alone, a skipped step undoes buffers and plain attributes together, and a
resumed run goes on with what training changed.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from stateful import BUFFERS, KINDS, Codebook
from torch import Tensor, nn
from vocabulary import same_bits

from mpframe import Backoff, Precision, Trainer, checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.core.casting.trace import preserve_state
from mpframe.core.errors import CheckpointError
from mpframe.core.objective import supervised
from mpframe.run.resume import Resume
from mpframe.training.plan import Plan

FIRST = itertools.cycle([True, False])
MODES = [("fp32", "float16"), ("amp", "bfloat16"), ("mixed", "float16")]
INF = float("inf")


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), KINDS[kind](), nn.Linear(4, 3))


def batch(rows: int, number: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(rows, 4, generator=generator) * scale
    return inputs, torch.arange(rows) % 3


def trainer_of(
    kind: str, mode: str = "fp32", half: str = "float16", fused: bool = False
) -> Trainer:
    model, precision = net(kind), Precision(mode, half)
    plain = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    model, optimizer = precision.prepare(model, plain, batch(3)[0])
    objective = supervised(nn.CrossEntropyLoss())
    scaler = None if mode == "fp32" else Backoff()
    return Trainer(model, optimizer, objective, precision, scaler=scaler, plan=Plan())


def state_of(model: nn.Module) -> dict[str, Any]:
    """Buffers and plain attributes by name, copied."""
    found: dict[str, Any] = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        hidden = vars(nn.Module())
        values = {n: v for n, v in vars(module).items() if n not in hidden and n != "weight"}
        found |= {f"{prefix}.{name}": value for name, value in values.items()}
    return copy.deepcopy(found)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        found = other[name]
        if isinstance(value, Tensor):
            pair = [t.to_dense() if t.is_sparse else t for t in (value, found)]
            assert same_bits(pair[:1], pair[1:]), name
        else:
            assert value == found, name


class TestDryRun:
    @pytest.mark.parametrize("kind", KINDS)
    def test_leaves_everything_as_it_was(self, kind: str) -> None:
        model = net(kind)
        before, buffers = state_of(model), dict(model.named_buffers())
        with preserve_state(model):
            model(batch(5)[0])
        assert_same(before, state_of(model))
        assert all(own is buffers[name] for name, own in model.named_buffers())

    def test_leaves_caches_and_tensors_in_plain_attributes(self) -> None:
        class Keeps(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("sum", torch.zeros(4))
                self.also, self.cache, self.seen = self.sum, {1: "one"}, {1}
                self.ema, self.last, self.order = torch.zeros(4), None, [1]

            def forward(self, x: Tensor) -> Tensor:
                self.also.add_(1)
                assert torch.equal(self.sum, self.also)
                self.ema.add_(1)
                self.cache[2], self.last, self.more = "two", x, 3
                self.seen.add(2)
                self.order += [2]
                return x

        model = Keeps()
        cache, ema = model.cache, model.ema
        with preserve_state(model):
            model(torch.ones(4))
        assert model.cache is cache
        assert model.ema is ema
        assert model.also is model.sum
        assert (cache, model.seen, model.order) == ({1: "one"}, {1}, [1])
        assert model.last is None
        assert not hasattr(model, "more")
        assert not model.ema.any()
        assert not model.sum.any()

    @pytest.mark.parametrize(
        ("mode", "half", "replaces"),
        [
            ("fp32", "float16", True),
            ("amp", "bfloat16", True),
            ("mixed", "float16", False),
            ("mixed", "float16", True),
        ],
    )
    def test_leaves_first_values_to_the_first_batch(
        self, mode: str, half: str, replaces: bool
    ) -> None:
        class ActNorm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))
                self.register_buffer("filled", torch.tensor(False))

            def forward(self, x: Tensor) -> Tensor:
                if not self.filled:
                    first = 1 / x.detach().float().std(0)
                    if replaces:
                        self.scale.data = first
                    else:
                        self.scale.data.copy_(first)
                    self.filled.fill_(True)
                return x * self.scale

        model, values = ActNorm(), torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        address = model.scale.data_ptr()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = Precision(mode, half).prepare(model, optimizer, values)
        assert torch.equal(model.scale, torch.ones(4))
        assert model.scale.data_ptr() == address
        assert not model.filled

    def test_leaves_containers_alone_that_refuse_a_change(self) -> None:
        class Frozen(dict[str, int]):
            def clear(self) -> None:
                raise TypeError("frozen")

        model = net("rotary")
        model.config = Frozen(width=4)
        with preserve_state(model):
            model(batch(5)[0])
        assert model.config == {"width": 4}

    def test_mixed_has_the_positions_that_fp32_has(self) -> None:
        """Its trace filled the cache; the first step has to fill it again."""
        trainer = trainer_of("rotary", "mixed")
        trainer.train_step(batch(3))
        cache = trainer.model[1].cache
        assert torch.equal(cache[:3], torch.arange(12.0).view(3, 4).cos())

    def test_giving_lazy_layers_their_shape_is_one(self) -> None:
        model = nn.Sequential(Codebook(), nn.LazyLinear(3), nn.LazyBatchNorm1d())
        Precision("mixed").trace(model, batch(3)[0])
        assert (model[0].calls, model[0].log) == (0, [])
        assert not model[0].mean.any()
        assert model[1].weight.shape == (3, 4)
        assert model[1].in_features == 4
        assert model[2].running_mean.shape == (3,)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor:UserWarning")
    @pytest.mark.parametrize("kind", BUFFERS)
    def test_takes_any_buffer(self, kind: str) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        buffer = BUFFERS[kind]()
        model.register_buffer("any", buffer)
        Precision("mixed").prepare(model, torch.optim.SGD(model.parameters()), batch(3)[0])
        assert model.any is buffer

    @pytest.mark.parametrize("resize", ["resize_", "data", "register_buffer"])
    def test_takes_a_buffer_that_is_resized(self, resize: str) -> None:
        class Resizes(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                if resize == "resize_":
                    self.size.resize_(9).fill_(1)
                elif resize == "data":
                    self.size.data = torch.ones(9)
                else:
                    self.register_buffer("size", torch.ones(9))
                return super().forward(x)

        model = Resizes(4, 4)
        model.register_buffer("size", torch.zeros(4))
        Precision("mixed").prepare(model, torch.optim.SGD(model.parameters()), batch(3)[0])
        assert torch.equal(model.size, torch.zeros(4))


class TestSkippedStep:
    @pytest.mark.parametrize(
        ("kind", "mode", "half", "fused", "first"),
        [
            *((k, *m, True, False) for k, m in zip(KINDS, itertools.cycle(MODES))),
            *(
                (k, *m, True, True)
                for k, m in zip(("rotary", "growing", "late"), MODES, strict=True)
            ),
            *((k, *m, False, f) for k, m, f in zip(KINDS, itertools.cycle(MODES), FIRST)),
        ],
    )
    @pytest.mark.usefixtures("waited_for")
    def test_undoes_buffers_and_attributes_together(
        self, kind: str, mode: str, half: str, fused: bool, first: bool
    ) -> None:
        """A fused optimizer skips on the device: the host learns of it where it has to."""
        trainer = trainer_of(kind, mode, half, fused)
        if not first:
            trainer.train_step(batch(3))
        before = state_of(trainer.model)
        trainer.train_step(batch(5, scale=INF))
        assert_same(before, state_of(trainer.model))
        after = trainer_of(kind, mode, half, fused)
        for number, rows in ((0, 3), (1, 6))[first:]:
            after.train_step(batch(rows, number))
        trainer.train_step(batch(6, 1))
        assert_same(state_of(trainer.model), state_of(after.model))

    @pytest.mark.parametrize("kind", ["rotary", "codebook", "bank", "late", "batch norm"])
    def test_so_does_a_dropped_micro_batch(self, kind: str) -> None:
        trainer, without = (trainer_of(kind, "mixed") for _ in range(2))
        good, bad, other = batch(3), batch(5, scale=INF), batch(4, 2)
        result = trainer.train_step(good, bad, other)
        without.train_step(good, other)
        assert int(result.dropped) == 1
        assert_same(state_of(trainer.model), state_of(without.model))

    @pytest.mark.usefixtures("waited_for")
    def test_the_host_waits_only_where_more_than_values_changed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reads: list[int] = []

        def counted(steps: Any) -> Any:
            reads.append(len(steps))
            return original(steps)

        buffers = __import__("mpframe.core.buffers", fromlist=["read"])
        original = buffers.read
        monkeypatch.setattr(buffers, "read", counted)
        for kind, expected in (("batch norm", 0), ("rotary", 1), ("codebook", 4)):
            trainer = trainer_of(kind, fused=True)
            trainer.train_step(batch(2))  # Known on the host: the optimizer's state is made.
            reads.clear()
            for number in range(4):
                trainer.train_step(batch(3, number))
            assert len(reads) == expected, kind

    def test_an_expanded_buffer_gets_its_values_back(self) -> None:
        """It cannot be written."""
        trainer = trainer_of("batch norm")
        trainer.model[1].register_buffer("expanded", torch.ones(1).expand(3))
        again = Trainer(trainer.model, trainer.optimizer, trainer.objective)
        again.train_step(batch(3, scale=INF))
        assert torch.equal(trainer.model[1].expanded, torch.ones(3))


class TestResume:
    def run(self, kind: str, steps: range, folder: Path | None = None) -> Trainer:
        """A trainer after these steps, saved there or continued from there."""
        trainer = trainer_of(kind)
        if folder is not None and steps.start:
            Resume("auto", folder, "").into(trainer)
        for number in steps:
            trainer.train_step(batch(3 + number % 4, number))
        if folder is not None and not steps.start:
            state = {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()}
            checkpoint.save(folder, Snapshot(steps.stop, state).to_cpu())
        return trainer

    @pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_exact(self, kind: str, tmp_path: Path) -> None:
        whole = self.run(kind, range(6))
        self.run(kind, range(3), tmp_path)
        resumed = self.run(kind, range(3, 6), tmp_path)
        weights = [list(trainer.weights().values()) for trainer in (whole, resumed)]
        pairs = [[w.to_dense() if w.is_sparse else w for w in one] for one in weights]
        assert same_bits(*pairs)
        states = [state_of(trainer.model) for trainer in (whole, resumed)]
        for state in states:  # A list is no number: what a module lists is not resumed.
            state.pop("1.log", None)
        assert_same(*states)

    def test_what_training_left_alone_is_not_saved(self) -> None:
        trainer = trainer_of("batch norm")
        trainer.model[1].register_buffer("mask", torch.full((4,), torch.inf), persistent=False)
        again = Trainer(trainer.model, trainer.optimizer, trainer.objective)
        again.train_step(batch(3))
        assert again.state_dict()["extra_state"] == {}

    @pytest.mark.parametrize("kind", ["growing, not saved", "bank", "late"])
    def test_an_earlier_state_is_put_back(self, kind: str) -> None:
        """As where a checkpoint turns out not to fit after half of it was loaded."""
        trainer = trainer_of(kind)
        before, state = state_of(trainer.model), copy.deepcopy(trainer.state_dict())
        trainer.train_step(batch(5))
        trainer.load_state_dict(state)
        assert_same(before, state_of(trainer.model))

    def test_nothing_else_is_taken(self) -> None:
        """A checkpoint may come from anybody."""
        trainer = trainer_of("bank")
        for name, value in (
            ("1.other", torch.zeros(3)),
            ("1.rows", 3),
            ("1.next", torch.zeros(3)),
            ("1.next", "three"),
            ("1._buffers", None),
            ("1.training", False),
            ("1.forward", 1),
        ):
            state = {**trainer.state_dict(), "extra_state": {name: value}}
            text = f"extra_state: {name!r} in the checkpoint is no buffer or number of the model"
            with pytest.raises(CheckpointError, match=text):
                trainer.load_state_dict(state)

    @pytest.mark.parametrize("persistent", [True, False])
    def test_a_jagged_buffer_is_refused_when_it_is_saved_or_left_out(
        self, persistent: bool, tmp_path: Path
    ) -> None:
        trainer = trainer_of("batch norm")
        trainer.model[1].register_buffer("jagged", BUFFERS["jagged"](), persistent=persistent)
        again = Trainer(trainer.model, trainer.optimizer, trainer.objective)
        snapshot = Snapshot(0, {"trainer": again.state_dict()}).to_cpu()
        if not persistent:
            assert checkpoint.save(tmp_path, snapshot).exists()
            return
        with pytest.raises(CheckpointError, match=r"the state holds torch\.nested"):
            checkpoint.save(tmp_path, snapshot)

    @pytest.mark.filterwarnings("ignore:.*parse:UserWarning")
    def test_a_sparse_tensor_may_have_a_large_shape(self, tmp_path: Path) -> None:
        trainer = trainer_of("sparse")
        large = torch.sparse_coo_tensor(torch.zeros(2, 1), torch.ones(1), (10**6, 10**6))
        trainer.model[1].register_buffer("large", large)
        checkpoint.save(tmp_path, Snapshot(0, {"trainer": trainer.state_dict()}).to_cpu())
        loaded = checkpoint.load(tmp_path)["trainer"]["weights"]["1.large"]
        assert torch.equal(loaded.coalesce().values(), torch.ones(1))
