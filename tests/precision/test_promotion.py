"""Whole training steps: no silent promotion anywhere, and amp beside torch's own autocast."""

import pytest
import torch
from test_storage import Reads
from torch import nn
from vocabulary import HALVES, NoSilentPromotion, same_bits

from mpframe import Backoff, OpLists, Precision, Trainer
from mpframe.config import CONF
from mpframe.core.objective import supervised
from mpframe.training.plan import Plan
from mpframe.workloads.detection import SSD, detection
from mpframe.workloads.images import cnn, mlp, resnet18
from mpframe.workloads.segmentation.model import UNet, dice_cross_entropy
from mpframe.workloads.speech import LSTM, ctc
from mpframe.workloads.tables.model import LogRegression, Tabular
from mpframe.workloads.text.language_model import GPT

IMAGES, TOKENS = torch.rand(4, 3, 16, 16), torch.randint(0, 11, (4, 5))
TARGETS, PIXELS = torch.tensor([0, 1, 2, 0]), torch.randint(0, 3, (4, 16, 16))
ROWS = {"categorical": torch.randint(0, 4, (4, 1)), "continuous": torch.rand(4, 2)}
ROWS |= {"target": torch.rand(4) + 1}
SEQUENCES = {"inputs": torch.rand(4, 6, 4), "input_lengths": [6, 6, 5, 4]}
SEQUENCES |= {"targets": torch.tensor([[1, 2]] * 4), "target_lengths": [2, 1, 2, 2]}
BOXES = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
SCENES = list(torch.rand(2, 3, 64, 64)), [BOXES, BOXES]
LAST = Reads(lambda _, logits: logits[:, -1])
CLASSES = supervised(nn.CrossEntropyLoss())
CASES = {
    "mlp": (lambda: mlp((3, 16, 16), 3, hidden=8, dropout=0.1), (IMAGES, TARGETS), CLASSES),
    "cnn": (lambda: cnn(3, 3, width=4), (IMAGES, TARGETS), CLASSES),
    "resnet18": (lambda: resnet18(3, width=4), (IMAGES, TARGETS), CLASSES),
    "gpt": (
        lambda: nn.Sequential(GPT(11, 5, 2, 2, 16, dropout=0.1), LAST),
        (TOKENS, TARGETS),
        CLASSES,
    ),
    "unet": (lambda: UNet(3, 3, width=4, stages=2), (IMAGES, PIXELS), dice_cross_entropy()),
    "tabular": (lambda: Tabular({"kind": 3}, ["x", "y"], (8,)), ROWS, LogRegression(0.0, 1.0)),
    "lstm": (lambda: LSTM(4, 3, hidden=8), SEQUENCES, ctc),
    "ssd": (lambda: SSD(3, 64, width=4), SCENES, detection),
}


def trainer_of(name, precision, clip_norm=None):
    torch.manual_seed(0)
    make, _, objective = CASES[name]
    model, scaler, plan = make(), Backoff(init_scale=2.0**8), Plan(clip_norm=clip_norm)
    _, masters = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return Trainer(model, masters, objective, precision, scaler, plan=plan)


# Each model in two of the modes; each mode, list and way to compute with several models.
MODES = [("fp32", "float16"), *((m, h) for m in ("mixed", "amp") for h in HALVES)]
LISTS = ["default", "fast", "default", "fp32_norms"]
ROWS_OF_MODES = [
    (name, *MODES[(number + turn) % 5], LISTS[(number + turn + number // 5) % 4], compute)
    for number, name in enumerate(CASES)
    for turn, compute in ((1, "native"), (3, "emulated"))
]


@pytest.mark.parametrize(("name", "mode", "half", "lists", "compute"), ROWS_OF_MODES)
def test_no_silent_promotion(name, mode, half, lists, compute) -> None:
    """Forward, backward, unscaling, clipping and update, of one step and of an accumulated one."""
    precision = Precision(mode, half, ops=OpLists.named(lists), compute=compute)
    trainer, batch = trainer_of(name, precision, clip_norm=1.0), CASES[name][1]
    with NoSilentPromotion():
        result = trainer.train_step(batch)
        trainer.train_step(batch, batch)
    assert not result.skipped
    assert torch.isfinite(result.loss)


def test_every_shipped_model_is_here() -> None:
    files = (CONF / "model").glob("*.yaml")
    shipped = {path.stem for path in files if "_target_: mpframe." in path.read_text()}
    assert shipped == {*CASES, "gan"}


def test_amp_in_bfloat16_is_torchs_autocast() -> None:
    """Where the lists agree (products, BatchNorm, poolings, cross entropy): bit for bit."""
    losses = [], []
    for ours, own in zip((True, False), losses, strict=True):
        precision = Precision("amp" if ours else "fp32", "bfloat16", compute="native")
        trainer = trainer_of("cnn", precision)
        for _ in range(5):  # torch's autocast keeps casts of weights as long as it lasts.
            with torch.autocast("cpu", torch.bfloat16, enabled=not ours):
                own.append(trainer.train_step((IMAGES, TARGETS)).loss)
    assert same_bits(*losses)
