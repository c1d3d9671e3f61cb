"""What a step costs: kernels that it launches on an accelerator, Python calls, and memory.

Kernels after the backward pass are counted on fake CUDA tensors. What lives from step to step
stays where it is, as a CUDA graph needs it, and is nothing more: all tensors that Python knows are
looked at after each step, by the address of their memory.
"""

import gc
import warnings

import pytest
import torch
from bench.calls import calls_of_a_step
from prepared import prepared
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from vocabulary import tensors

from mpframe import Backoff, LogMax, Precision, Static
from mpframe.core.comm import Comm
from mpframe.core.loss_scaling import logmax
from mpframe.core.objective import StepOutput
from mpframe.core.optim import master_weights
from mpframe.core.step_result import Verdict
from mpframe.core.trainer import StepOptions, StepTrainer
from mpframe.precision.torch_functions import _users, stop_following
from mpframe.training.evaluation import Evaluator
from mpframe.training.plan import Plan

FREE = (  # views, and memory that nothing is written to
    "view _unsafe_view reshape alias expand t unsqueeze squeeze detach slice select as_strided "
    "unbind split empty empty_like empty_strided new_empty lift_fresh device"
)


class Launches(TorchDispatchMode):
    """Counts while it is `on`."""

    on, names = False, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        # Fake tensors do not know this one, which returns nothing.
        out = None if name == "_fused_sgd_" else func(*args, **(kwargs or {}))
        on_device = any(t.device.type == "cuda" for t in tensors((args, kwargs, out)))
        if self.on and name not in FREE and on_device:
            self.names = [*self.names, name]
        return out


def normed(layers, width):
    pairs = [(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(layers)]
    return nn.Sequential(*(module for pair in pairs for module in pair))


def trainer_of(model, objective, mode, half, scaler, clip=1.0, comm=None):
    precision, options = Precision(mode, half=half), StepOptions(clip_norm=clip)
    model, wrapped = precision.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    return StepTrainer(
        model, wrapped, objective, precision, scaler, plan=options, comm=comm or Comm()
    )


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("case", "goal"),
    [
        (("fp32", "float16", None, 1.0, 1), 13),
        (("amp", "bfloat16", None, 1.0, 1), 13),
        (("amp", "bfloat16", None, None, 1), 10),
        (("amp", "float16", Backoff, 1.0, 1), 18),
        (("amp", "float16", Backoff, 0.1, 1), 19),
        (("amp", "float16", LogMax, 1.0, 1), 16),
        (("amp", "float16", Static, 1.0, 1), 15),
        (("mixed", "bfloat16", None, 1.0, 1), 22),
        (("mixed", "float16", Backoff, 1.0, 1), 28),
        (("mixed", "float16", LogMax, 1.0, 1), 26),
        (("mixed", "float16", Backoff, None, 1), 23),
        (("amp", "float16", Backoff, 1.0, 3), 94),
        (("mixed", "float16", Backoff, 1.0, 3), 106),
        (("mixed", "bfloat16", None, None, 3), 94),
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [2, 8, pytest.param(32, marks=pytest.mark.slow)])
def test_launches_do_not_grow_with_the_model(case, goal, layers, monkeypatch) -> None:
    """Of a second step: the first one makes the optimizer's state."""
    # The first step reads its verdict, which fake tensors cannot tell.
    good = [Verdict(skipped=False, dropped=0)]
    monkeypatch.setattr(master_weights, "read_verdicts", lambda steps: good * len(steps))

    def one_kernel(*state):  # what test_logmax.py sees a compiler make of it
        launches.on = False
        observed = LogMax._observe(*state)
        launches.on = True
        return {**observed, "scale": observed["scale"].clone()}

    monkeypatch.setattr(logmax, "_ways", lambda: [one_kernel])

    def objective(model, batch):
        launches.on = False  # a forward pass, which is not counted
        return StepOutput(model[0](batch).float().mean(), len(batch))

    def backward(*_) -> None:  # in place of autograd, which does not run on fake CUDA tensors
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        launches.on = True

    mode, half, scaler, clip, window = case
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model, batch, comm = normed(layers, 64), torch.zeros(4, 64), Comm()
        scaler = scaler and scaler().to("cuda")
        trainer = trainer_of(model, objective, mode, half, scaler, clip, comm)
        comm.backward = backward
        for _ in range(2):
            with Launches() as launches:
                trainer.train_step(*[batch] * window)
        assert len(launches.names) == goal


@pytest.mark.parametrize(("mode", "limit"), [("fp32", 49), ("mixed", 54)])
def test_no_call_is_added_to_a_step(mode, limit) -> None:
    """On Python 3.11. Newer ones inline comprehensions, and make fewer calls."""
    for user in [*_users]:  # Precisions that other tests left.
        stop_following(user)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    options = {"scaler": Backoff(), "plan": Plan(max_steps=10), "evaluator": Evaluator()}
    trainer = prepared(model, nn.CrossEntropyLoss(), mode, optimizer=torch.optim.AdamW, **options)
    batch = torch.randn(4, 8), torch.randint(0, 4, (4,))
    assert 0 < calls_of_a_step(trainer, batch) <= limit


def living() -> dict[int, int]:
    """The bytes of each memory on the CPU, by address."""
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # Deprecated names are asked for their type.
        known = [t for t in gc.get_objects() if isinstance(t, Tensor)]
    stored = [t.untyped_storage() for t in known if t.layout == torch.strided]
    return {memory.data_ptr(): memory.nbytes() for memory in stored if memory.device.type == "cpu"}


@pytest.mark.usefixtures("only_new_tensors")
@pytest.mark.parametrize(
    ("mode", "half", "scaler", "window", "bytes_each"),
    [
        ("fp32", "float16", None, 1, 12),
        ("amp", "bfloat16", None, 1, 12),
        ("amp", "float16", LogMax, 3, 12),
        ("mixed", "bfloat16", None, 3, 14),  # Weights of 2 bytes, masters of 4, two moments.
        ("mixed", "float16", Backoff, 1, 14),
    ],
)
def test_nothing_moves_or_is_left_behind(mode, half, scaler, window, bytes_each) -> None:
    # Of smaller weights masters keep a copy, to notice writes, and not row sums.
    model, batch, made = normed(2, 512), torch.randn(4, 512), scaler and scaler()
    parameters = sum(parameter.numel() for parameter in model.parameters())

    def objective(model, batch):
        return StepOutput(model(batch).float().square().mean(), len(batch))

    trainer = trainer_of(model, objective, mode, half, made)
    for _ in range(3):
        trainer.train_step(*[batch] * window)
    trainer.optimizer.zero_grad()
    first = living()
    for _ in range(20):
        trainer.train_step(*[batch] * window)
        # A scaler's numbers are new after each step, because the result keeps the scale it used.
        numbers = made.state.values() if made else ()
        scale = {value.untyped_storage().data_ptr() for value in numbers}
        assert not living().keys() - first.keys() - scale
    held = sum(first.values()) - batch.nbytes
    # Counts of steps, numbers of a scaler, sums of rows, copies of vectors: a hundredth.
    assert 0 <= held / parameters - bytes_each <= 0.1
