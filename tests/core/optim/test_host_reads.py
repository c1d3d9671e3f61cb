"""How often a step makes the host wait for its device: once with a plain optimizer, at most.

On a CPU nothing waits, so what would wait elsewhere is counted: the reads of a value (`item`,
`bool`, `float`, `tolist`, ...) and the ops whose shape depends on values. Two things are left out:
what torch's optimizers read of their own step counters, which lie on the CPU on every device; and
the comparison of half weights with what they were, which is made on CPUs alone (masters.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpframe import Backoff, LogMax, Precision, Static, StepResult, Trainer
from mpframe.core.callback import Algorithm, Callback
from mpframe.core.objective import StepOutput, supervised
from mpframe.lab.autopsy.callback import Autopsy
from mpframe.training.callbacks.ema import AverageWeights, Ema, ema_of
from mpframe.training.callbacks.schedules import Schedules, warmup_cosine
from mpframe.training.optimizers.multi_objective import MultiObjectiveTrainer
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.plan import Plan

pytestmark = pytest.mark.usefixtures("waited_for")

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique")
SCALERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "static": lambda: Static(2.0**10),
    "Backoff": lambda: Backoff(growth_interval=3),
    "LogMax": LogMax,
}


class Reads(TorchDispatchMode):
    """Counts the reads within its block, and says what happened in which order.

    Attributes:
        events: `read`, `backward` and `update` as they came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in READS:
            self.saw("read")
        return func(*args, **(kwargs or {}))

    def saw(self, event: str) -> None:
        if not self.paused:
            self.events.append(event)

    @property
    def count(self) -> int:
        return self.events.count("read")


class Batches:
    """The same number of batches in every epoch; the third is too large for float16."""

    def __init__(self, count: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [
            (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(self._batches[start:])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """`tolist` reads without an op that could be counted; so it is counted by itself."""
    counted, original = Reads(), Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        counted.saw("read")
        with torch.utils._python_dispatch._disable_current_modes():
            return original(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return counted


def trainer_of(
    reads: Reads,
    mode: str = "fp32",
    half: str = "float16",
    optimizer: Any = SGD,
    scaler: Any = None,
    scheduled: bool = False,
    average: bool = False,
    callbacks: Any = None,
    plan: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    plain = optimizer(model.parameters(), lr=0.01, **arguments)
    schedule = warmup_cosine(plain, total_steps=100) if scheduled else None

    def before(*_: Any) -> None:
        reads.saw("update")
        reads.paused = True

    def after(*_: Any) -> None:
        reads.paused = False

    plain.register_step_pre_hook(before)
    plain.register_step_post_hook(after)
    precision = Precision(mode, half)
    model, masters = precision.prepare(model, plain)
    last = model[3].weight
    last.register_hook(lambda gradient: reads.saw("backward"))
    ema = Ema({p: masters.master_of(p) for p in model.parameters()}, 0.9) if average else None
    algorithms: dict[str, Algorithm] = {} if ema is None else {"ema": AverageWeights(ema, model)}
    if schedule is not None:
        algorithms["schedule"] = Schedules(schedule)
    return Trainer(
        model,
        masters,
        supervised(nn.CrossEntropyLoss()),
        precision,
        scaler=scaler,
        algorithms=algorithms,
        plan=Plan(**(plan or {})),
        callbacks=callbacks or {},
    )


@pytest.mark.parametrize(
    ("mode", "half", "optimizer", "scaler", "clipped"),
    [
        ("fp32", "float16", SGD, "none", True),
        ("mixed", "float16", AdamW, "Backoff", False),
        ("mixed", "bfloat16", SGD, "static", True),
        ("amp", "float16", AdamW, "LogMax", True),
        ("amp", "bfloat16", Adam, "LogMax", False),
        ("fp32", "float16", SGD, "LogMax", False),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_plain_optimizer_is_told_once_a_step_and_a_fused_one_read_at_the_end_alone(
    mode: str, half: str, optimizer: Any, scaler: str, clipped: bool, fused: bool, reads: Reads
) -> None:
    """But for the first fused step, in which its state is made: MasterWeights.skips_on_device."""
    plan = {"clip_norm": 0.1, "accumulate": 2} if clipped else {}
    options = {"plan": plan, "average": True, "scheduled": not fused}
    options["fused" if fused else "foreach"] = True
    trainer = trainer_of(reads, mode, half, optimizer, SCALERS[scaler](), **options)
    with reads:
        trainer.fit(Batches())
    steps = 8 // plan.get("accumulate", 1)
    assert trainer.progress.global_step == steps
    updates = [event for event in reads.events if event != "backward"]
    if fused:
        assert updates == ["read", *["update"] * steps, "read"]
    assert reads.count == (2 if fused else steps)


def test_it_is_read_after_the_backward_pass_and_just_before_the_update(reads: Reads) -> None:
    trainer = trainer_of(reads, "mixed", scaler=Backoff(), scheduled=True)
    with reads:
        trainer.fit(Batches(3))
    assert reads.events == ["backward", "read", "update"] * 3


def test_a_schedule_reads_after_the_next_backward_pass(reads: Reads) -> None:
    """Once a step, when the device has the next forward and backward pass queued."""
    trainer = trainer_of(reads, "mixed", scaler=Backoff(), scheduled=True, fused=True)
    with reads:
        trainer.fit(Batches(4))
    first = ["backward", "read", "update"]
    # The second step finds nothing unread: the first was known on the host.
    assert reads.events == [
        *first,
        *["backward", "update"],
        *["backward", "read", "update"] * 2,
        "read",
    ]


class EveryThird(Callback):
    """Needs the verdict of every third step right after it."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_optimizer_step(self, trainer: Trainer, result: StepResult) -> None:
        self.steps.append(trainer.progress.global_step)

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.global_step % 3 == 0:
            trainer.read_verdicts()


def test_a_callback_that_is_due_reads_all_steps_before_it_at_once(reads: Reads) -> None:
    """Steps are told one by one, in order, each with the count as it stood after it."""
    watching = EveryThird()
    trainer = trainer_of(reads, scaler=Backoff(), fused=True, callbacks={"third": watching})
    with reads:
        trainer.fit(Batches(8))
    assert watching.steps == list(range(1, 9))
    updates = [event for event in reads.events if event != "backward"]
    three = ["update"] * 3
    assert updates == ["read", *three, "read", *three, "read", "update", "update", "read"]


@pytest.mark.parametrize(("on", "count"), [(False, 2), (True, 8)])
def test_the_autopsy_reads_each_step_unless_it_is_off(on: bool, count: int, reads: Reads) -> None:
    """It examines a step with the weights that the step had."""
    watching = Autopsy(after=10, limit=50) if on else Callback()
    trainer = trainer_of(reads, scaler=Backoff(), fused=True, callbacks={"autopsy": watching})
    with reads:
        trainer.fit(Batches(8))
    assert reads.count == count


class Overflowing(Batches):
    """The batches whose numbers are given overflow: BatchNorm's statistics and all gradients."""

    def __init__(self, count: int, overflows: set[int]) -> None:
        super().__init__(count)
        for number in overflows:
            self._batches[number][0][0, 0] = float("inf")


def states(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state_dict()
    return {**state["weights"], **{f"average {n}": own for n, own in state.get("ema", {}).items()}}


@pytest.mark.parametrize(
    ("mode", "half", "scheduled"),
    [("fp32", "float16", False), ("mixed", "float16", True), ("amp", "bfloat16", False)],
)
def test_steps_skipped_on_the_device_change_nothing_at_all(
    mode: str, half: str, scheduled: bool, reads: Reads
) -> None:
    """The verdicts are read late: what is trained is what a reading after every step gives."""

    class Every(EveryThird):
        def on_step_end(self, trainer: Trainer) -> None:
            trainer.read_verdicts()

    options = {"scheduled": scheduled, "average": True, "fused": True}
    trained = [
        trainer_of(reads, mode, half, AdamW, Backoff(2.0**8, growth_interval=2), **options, **told)
        for told in ({"callbacks": {"third": EveryThird()}}, {"callbacks": {"every": Every()}})
    ]
    for trainer in trained:
        trainer.fit(Overflowing(10, {0, 3, 4, 9}))
        assert (trainer.progress.steps, trainer.progress.skipped) == (6, 4)
        assert trainer.progress.skipped_in_a_row == 1
        assert trainer.progress.pending == 0
        ema = ema_of(trainer)
        assert ema is not None
        assert ema.updates == 6
    late, early = map(states, trained)
    assert late.keys() == early.keys()
    assert [name for name in late if not torch.equal(late[name], early[name])] == []
    assert all(value.isfinite().all() for value in late.values())


@pytest.mark.parametrize(
    ("mode", "half", "scheduled"),
    [("fp32", "float16", False), ("mixed", "float16", True), ("amp", "bfloat16", False)],
)
def test_a_run_that_is_saved_with_unread_steps_goes_on_bit_for_bit(
    mode: str, half: str, scheduled: bool, reads: Reads
) -> None:
    batches = Overflowing(9, {2, 5})._batches
    options = {"scheduled": scheduled, "average": True, "fused": True}
    whole, first, second = (
        trainer_of(reads, mode, half, AdamW, Backoff(2.0**8), **options) for _ in range(3)
    )
    for batch in batches:
        whole.train_step(batch)
    for batch in batches[:6]:
        first.train_step(batch)
    assert first.progress.pending > 0
    second.load_state_dict(first.state_dict())
    assert (second.progress.steps, second.progress.skipped, second.progress.pending) == (4, 2, 0)
    for batch in batches[6:]:
        second.train_step(batch)
    expected, resumed = states(whole), states(second)
    assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == []
    assert whole.progress == second.progress


def test_the_last_step_is_the_planned_one_though_skipped_ones_do_not_count(reads: Reads) -> None:
    """Near `max_steps` the loop has to know which steps count."""
    trainer = trainer_of(reads, scaler=Backoff(), fused=True, plan={"epochs": 3, "max_steps": 7})
    trainer.fit(Overflowing(6, {1, 2}))
    assert (trainer.progress.steps, trainer.progress.skipped) == (7, 4)


def test_no_run_goes_on_for_ever_without_a_look(reads: Reads) -> None:
    trainer = trainer_of(reads, scaler=Backoff(), fused=True)
    with reads:
        trainer.fit(Batches(110))
    assert reads.count == 3  # The first step, after 100 more, at the end.


@pytest.mark.parametrize("skip", ["each", "all"])
def test_the_schedules_of_several_losses_do_not_lag(skip: str) -> None:
    """With fused optimizers: the learning rate of a step is the one after the step before."""
    rates = []

    def objective(part: str) -> Any:
        return lambda model, batch: StepOutput(model[part](batch[0]).square().mean())

    model = nn.ModuleDict({"first": nn.Linear(6, 2), "second": nn.Linear(6, 2)})
    plain = {name: SGD(own.parameters(), lr=1.0, fused=True) for name, own in model.items()}
    schedules = {n: torch.optim.lr_scheduler.ExponentialLR(own, 0.5) for n, own in plain.items()}
    for own in plain.values():
        own.register_step_pre_hook(lambda own, *_: rates.append(own.param_groups[0]["lr"]))
    parts = {name: Precision().prepare(model, own)[1] for name, own in plain.items()}
    trainer = MultiObjectiveTrainer(
        model,
        MultiOptimizer(parts, skip=skip, own_losses=True),
        {name: objective(name) for name in parts},
        algorithms={"schedule": Schedules(schedules)},
    )
    for batch in Batches(4).epoch(0):
        trainer.train_step(batch)
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
