"""Kernels that a step launches on an accelerator after its backward pass, on fake CUDA tensors."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpframe import Backoff, LogMax, Precision
from mpframe.core.comm import Comm
from mpframe.core.loss_scaling import logmax
from mpframe.core.objective import StepOutput
from mpframe.core.optim import master_weights
from mpframe.core.step_result import Verdict
from mpframe.core.trainer import StepOptions, StepTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.filterwarnings("ignore:CUDA is not available"),
]
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
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        if self.on and name not in FREE and any(t.device.type == "cuda" for t in tensors):
            self.names = [*self.names, name]
        return out


def launched(layers, mode, half, scaler=None, clip=1.0, window=1):
    """The count of a second step: the first one makes the optimizer's state."""

    def objective(model, batch):
        launches.on = False  # a forward pass, which is not counted
        return StepOutput(model[0](batch).float().mean(), len(batch))

    def backward(*_) -> None:  # in place of autograd, which does not run on fake CUDA tensors
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        launches.on = True

    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            pairs = [(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(layers)]
            model, batch = nn.Sequential(*(m for pair in pairs for m in pair)), torch.zeros(4, 64)
        precision, comm = Precision(mode, half=half), Comm()
        model, wrapped = precision.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        scaler, options = scaler and scaler().to("cuda"), StepOptions(clip_norm=clip)
        trainer = StepTrainer(model, wrapped, objective, precision, scaler, plan=options, comm=comm)
        for _ in range(2):
            launches, comm.backward = Launches(), backward
            with launches:
                trainer.train_step(*[batch] * window)
        return len(launches.names)


@pytest.mark.parametrize(
    ("case", "goal"),
    [
        (("fp32", "float16"), 16),
        (("amp", "bfloat16"), 16),
        (("amp", "bfloat16", None, None), 12),
        (("amp", "float16", Backoff), 20),
        (("amp", "float16", Backoff, 0.1), 21),
        (("amp", "float16", LogMax), 109),  # A compiler makes one kernel of 92.
        (("mixed", "bfloat16"), 23),
        (("mixed", "float16", Backoff), 29),
        (("mixed", "float16", Backoff, None), 24),
        (("amp", "float16", Backoff, 1.0, 3), 96),
        (("mixed", "float16", Backoff, 1.0, 3), 108),
        (("mixed", "bfloat16", None, None, 3), 95),
    ],
    ids=str,
)
@pytest.mark.parametrize("layers", [2, 8])
def test_the_count_does_not_grow_with_the_model(case, goal, layers, monkeypatch) -> None:
    # The first step reads its verdict, which fake tensors cannot tell.
    good = [Verdict(skipped=False, dropped=0)]
    monkeypatch.setattr(master_weights, "read_verdicts", lambda steps: good * len(steps))
    monkeypatch.setattr(logmax, "_ways", lambda: [LogMax._observe])  # without a compiler
    assert launched(layers, *case) == goal
