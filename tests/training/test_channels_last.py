"""`trainer.channels_last`: another order in memory, the same training."""

import pytest
import torch
from torch import Tensor, nn

from mpframe import Backoff, Precision, Trainer
from mpframe.core.errors import ConfigError
from mpframe.core.objective import supervised
from mpframe.training.memory import to_channels_last
from mpframe.training.plan import Plan
from mpframe.workloads.images import resnet18
from mpframe.workloads.segmentation.model import UNet


def trained(mode: str, half: str, reordered: bool) -> Trainer:
    """After three steps, the last with clipped gradients."""
    torch.manual_seed(0)
    model = UNet(channels=3, classes=2, width=4, stages=2)
    if reordered:
        to_channels_last(model)
    precision = Precision(mode, half)
    model, optimizer = precision.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    )
    objective, scaler = supervised(nn.CrossEntropyLoss()), None if mode == "fp32" else Backoff()
    plan = Plan(clip_norm=0.1)
    trainer = Trainer(model, optimizer, objective, precision, scaler=scaler, plan=plan)
    batch = torch.randn(2, 3, 8, 8), torch.randint(0, 2, (2, 8, 8))
    for _ in range(3):
        trainer.train_step(batch)
    trainer.read_verdicts()
    return trainer


def ordered(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("mode", "half"), [("fp32", "float16"), ("amp", "bfloat16"), ("mixed", "bfloat16")]
)
def test_weights_masters_and_images_keep_the_order_and_the_training_is_the_same(
    mode: str, half: str
) -> None:
    trainer, plain = trained(mode, half, True), trained(mode, half, False)
    for weight in trainer.model.parameters():
        if weight.dim() == 4:
            assert ordered(weight)
            assert ordered(trainer.optimizer.master_of(weight))
    with torch.no_grad():
        assert ordered(trainer.model.float()(torch.randn(2, 3, 8, 8)))
    # Sums in another order. Adam moves a weight by lr at most, three times, whatever its gradient;
    # one whose gradient is nothing but rounding may go the other way.
    mine, theirs = trainer.weights(), plain.weights()
    far = [(mine[n] - theirs[n]).abs().flatten() for n in mine if n.endswith("weight")]
    assert torch.cat(far).max() <= 2 * 3 * 1e-2 * 1.01
    assert torch.cat(far).median() < 1e-3


def test_a_convolution_that_would_damage_memory_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        to_channels_last(resnet18(classes=2, width=4))
    assert str(refused.value) == (
        "trainer.channels_last=true: layer2.0.downsample.0 is a 1 x 1 convolution with a stride "
        "and 4 channels, and on some CPUs its backward pass in this order damages memory; use "
        "trainer.channels_last=false or 8 channels and more"
    )
    to_channels_last(resnet18(classes=2, width=8))
