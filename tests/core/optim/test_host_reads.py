"""How often a step makes the host wait for its device: once with a plain optimizer, at most.

On a CPU nothing waits, so what would wait elsewhere is counted: the reads of a value (`item`,
`bool`, `float`, `tolist`, ...) and the ops whose shape depends on values. Two things are left out:
what torch's optimizers read of their own step counters, which lie on the CPU on every device; and
the comparison of half weights with what they were, which is made on CPUs alone (masters.py).
"""

import pytest
import torch
from prepared import Batches
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vocabulary import differing, tensors

from mpframe import Backoff, LogMax, Precision, Static, Trainer
from mpframe.core.callback import Callback
from mpframe.core.objective import StepOutput, supervised
from mpframe.lab.autopsy.callback import Autopsy
from mpframe.training.callbacks.ema import Ema, ema_of
from mpframe.training.callbacks.schedules import Schedules, warmup_cosine
from mpframe.training.optimizers.multi_optimizer import MultiOptimizer
from mpframe.training.plan import Plan
from mpframe.training.trainers.multi_objective import MultiObjectiveTrainer

pytestmark = pytest.mark.usefixtures("waited_for")
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique")


class Reads(TorchDispatchMode):
    """Notes each `read`, `backward` and `update` within its block, as they come."""

    events, paused = (), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in READS:
            self.saw("read")
        return func(*args, **(kwargs or {}))

    def saw(self, event) -> None:
        if not self.paused:
            self.events = [*self.events, event]

    def pause(self, *_) -> None:
        self.saw("update")
        self.paused = True

    def go_on(self, *_) -> None:
        self.paused = False


@pytest.fixture
def reads(monkeypatch):
    """`tolist` reads without an op that could be counted; so it is counted by itself."""
    counted, original = Reads(), Tensor.tolist

    def tolist(tensor):
        counted.saw("read")
        with _disable_current_modes():
            return original(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return counted


def batches(count, overflows=()):
    """The same ones in every epoch; those whose numbers are given overflow all gradients."""
    generator, made = torch.Generator().manual_seed(0), Batches()
    for number in range(count):
        inputs = torch.randn(4, 6, generator=generator)
        inputs[0, 0] = torch.inf if number in overflows else inputs[0, 0]
        made.append((inputs, torch.randint(0, 3, (4,), generator=generator)))
    return made


def trainer_of(
    reads, mode="fp32", half="float16", cls=SGD, scaler=None, scheduled=False, average=False,
    callback=None, plan=None, **options,
):  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    plain, algorithms = cls(model.parameters(), lr=0.01, **options), {}
    if scheduled:
        algorithms["schedule"] = Schedules(warmup_cosine(plain, total_steps=100))
    plain.register_step_pre_hook(reads.pause)
    plain.register_step_post_hook(reads.go_on)
    precision = Precision(mode, half)
    model, masters = precision.prepare(model, plain)
    model[3].weight.register_hook(lambda gradient: reads.saw("backward"))
    if average:
        ema = Ema(model, {p: masters.master_of(p) for p in model.parameters()}, 0.9)
        algorithms["ema"] = ema
    return Trainer(
        model, masters, supervised(nn.CrossEntropyLoss()), precision, scaler=scaler,
        algorithms=algorithms, plan=Plan(**(plan or {})),
        callbacks={} if callback is None else {"own": callback},
    )  # fmt: skip


def events_of(trainer, reads, count, without=None):
    """What is noted of a run over so many batches."""
    with reads:
        trainer.fit(batches(count))
    return [event for event in reads.events if event != without]


@pytest.mark.parametrize(
    ("mode", "half", "cls", "make", "clipped"),
    [
        ("fp32", "float16", SGD, lambda: None, True),
        ("mixed", "float16", AdamW, lambda: Backoff(growth_interval=3), False),
        ("mixed", "bfloat16", SGD, lambda: Static(2.0**10), True),
        ("amp", "float16", AdamW, LogMax, True),
        ("amp", "bfloat16", Adam, LogMax, False),
        ("fp32", "float16", SGD, LogMax, False),
    ],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_plain_optimizer_is_told_once_a_step_and_a_fused_one_read_at_the_end_alone(
    mode, half, cls, make, clipped, on_device, reads
) -> None:
    """But for the first fused step, in which its state is made: MasterWeights.skips_on_device."""
    plan = {"clip_norm": 0.1, "accumulate": 2} if clipped else {}
    kernels = {"fused" if on_device else "foreach": True}
    options = {"plan": plan, "average": True, "scheduled": not on_device, **kernels}
    trainer = trainer_of(reads, mode, half, cls, make(), **options)
    updates = events_of(trainer, reads, 8, without="backward")
    steps = 4 if clipped else 8
    assert trainer.progress.global_step == steps
    if on_device:
        assert updates == ["read", *["update"] * steps, "read"]
    else:
        assert updates.count("read") == steps


@pytest.mark.parametrize("on_device", [False, True])
def test_a_schedule_reads_between_the_backward_pass_and_the_update(on_device, reads) -> None:
    """Then the device has the next forward and backward pass queued."""
    trainer = trainer_of(reads, "mixed", scaler=Backoff(), scheduled=True, fused=on_device)
    step = ["backward", "read", "update"]
    # The second fused step finds nothing unread: the first was known on the host.
    late = [*step, "backward", "update", *step * 2, "read"]
    assert events_of(trainer, reads, 4) == (late if on_device else step * 4)


class EveryThird(Callback):
    """Needs the verdict of every third step, or of another one, right after it."""

    def __init__(self, third=3):
        self.steps, self.third = [], third

    def on_optimizer_step(self, trainer, result) -> None:
        self.steps.append(trainer.progress.global_step)

    def on_step_end(self, trainer) -> None:
        if trainer.progress.global_step % self.third == 0:
            trainer.read_verdicts()


@pytest.mark.parametrize(
    ("callback", "count", "read_after"),
    [
        (EveryThird(3), 8, [0, 3, 6, 8]),
        (None, 110, [0, 101, 110]),  # None goes on for ever.
        (Autopsy(after=10, limit=50), 8, [0, *range(2, 9)]),  # It looks at each step's weights.
    ],
    ids=["a callback", "100 steps", "an autopsy"],
)
def test_all_steps_are_read_at_once_where_a_callback_is_due_or_after_100_steps_or_an_autopsy(
    callback, count, read_after, reads
) -> None:
    """Steps are told one by one, in order, each with the count as it stood after it."""
    trainer = trainer_of(reads, scaler=Backoff(), callback=callback, fused=True)
    updates = events_of(trainer, reads, count, without="backward")
    read = [updates[:place].count("update") for place, e in enumerate(updates) if e == "read"]
    assert read == read_after
    if isinstance(callback, EveryThird):
        assert callback.steps == list(range(1, 9))


@pytest.mark.parametrize(
    ("mode", "half", "scheduled"),
    [("fp32", "float16", False), ("mixed", "float16", True), ("amp", "bfloat16", False)],
)
def test_steps_skipped_on_the_device_change_nothing_at_all_also_in_a_run_saved_with_unread_ones(
    mode, half, scheduled, reads
) -> None:
    """The verdicts are read late: what is trained is what a reading after every step gives."""
    own = {"scheduled": scheduled, "average": True, "fused": True}
    late, each, first, resumed = (
        trainer_of(reads, mode, half, AdamW, scaler, callback=EveryThird(third), **own)
        for third in (3, 1, 99, 99)
        for scaler in [Backoff(2.0**8, growth_interval=2)]
    )
    given = batches(10, {0, 3, 4, 9})
    for trainer in (late, each):
        trainer.fit(given)
    for batch in given[:6]:
        first.train_step(batch)
    assert first.progress.pending > 0
    resumed.load_state_dict(first.state_dict())
    progress = resumed.progress
    assert (progress.steps, progress.skipped, progress.pending) == (3, 3, 0)
    for batch in given[6:]:
        resumed.train_step(batch)
    states = [
        (own["weights"], own["ema"]) for own in map(Trainer.state_dict, (late, each, resumed))
    ]
    assert all(value.isfinite().all() for value in tensors(states))
    for trainer, state in zip((late, each, resumed), states, strict=True):
        assert differing(states[0], state) == []
        progress = trainer.progress
        assert (progress.steps, progress.skipped, progress.skipped_in_a_row) == (6, 4, 1)
        assert (progress.pending, ema_of(trainer).updates) == (0, 6)


def test_the_last_step_is_the_planned_one_though_skipped_ones_do_not_count(reads) -> None:
    """Near `max_steps` the loop has to know which steps count."""
    plan = {"epochs": 3, "max_steps": 7}
    trainer = trainer_of(reads, scaler=Backoff(), plan=plan, fused=True)
    trainer.fit(batches(6, {1, 2}))
    assert (trainer.progress.steps, trainer.progress.skipped) == (7, 4)


@pytest.mark.parametrize("skip", ["each", "all"])
def test_the_schedules_of_several_losses_do_not_lag(skip) -> None:
    """With fused optimizers: the learning rate of a step is the one after the step before."""
    model, rates = nn.ModuleDict({"first": nn.Linear(6, 2), "second": nn.Linear(6, 2)}), []
    parts, losses, schedules = {}, {}, {}
    for name, part in model.items():
        plain = SGD(part.parameters(), lr=1.0, fused=True)
        plain.register_step_pre_hook(lambda own, *_: rates.append(own.param_groups[0]["lr"]))
        schedules[name] = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        parts[name] = Precision().prepare(model, plain)[1]
        losses[name] = lambda _, batch, part=part: StepOutput(part(batch[0]).square().mean())
    optimizer = MultiOptimizer(parts, skip=skip, own_losses=True)
    algorithms = {"schedule": Schedules(schedules)}
    trainer = MultiObjectiveTrainer(model, optimizer, losses, algorithms=algorithms)
    for batch in batches(4):
        trainer.train_step(batch)
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
