"""init_from with weights that torchvision and runs of ours wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log
from in_process import train
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import resnet18

from mpframe import Precision, Trainer, checkpoint
from mpframe.checkpoint.state import weights_of
from mpframe.config.schema import RunOptions
from mpframe.core.errors import CheckpointError
from mpframe.core.objective import supervised
from mpframe.core.tree import HALF
from mpframe.run.resume import take_first_weights


def trainer_of(model: nn.Module, mode: Any = "mixed") -> Trainer:
    precision = Precision(mode)
    prepared, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return Trainer(prepared, optimizer, supervised(nn.CrossEntropyLoss()), precision)


def assert_taken(trainer: Trainer, saved: dict[str, Tensor], but: str = "nothing") -> None:
    """Masters and buffers are the file's bit for bit, half weights the masters' rounding."""
    weights = trainer.weights()
    for name, tensor in saved.items():
        if not name.startswith(but):
            expected = tensor.float() if tensor.is_floating_point() else tensor
            assert torch.equal(weights[name], expected), name
    for parameter in trainer.model.parameters():
        master = trainer.optimizer.master_of(parameter)
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.fixture(scope="module")
def resnet_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights as torchvision's users save them, the statistics of BatchNorm moved."""
    model = resnet18(num_classes=7)
    model(torch.rand(2, 3, 32, 32))
    path = tmp_path_factory.mktemp("resnet") / "resnet18.pth"
    torch.save(model.state_dict(), path)
    return path


@pytest.mark.parametrize("mode", ["fp32", "mixed"])
def test_torchvisions_resnet18_is_taken_bit_for_bit(mode: str, resnet_file: Path) -> None:
    saved = torch.load(resnet_file, weights_only=True)
    assert saved["bn1.num_batches_tracked"] == 1
    trainer = trainer_of(resnet18(num_classes=7), mode)
    take_first_weights(trainer, RunOptions(init_from=str(resnet_file)))
    assert_taken(trainer, saved)
    assert any(p.dtype in HALF for p in trainer.model.parameters()) == (mode == "mixed")


def test_a_new_head_is_refused_or_keeps_its_first_values(resnet_file: Path, caplog: Log) -> None:
    caplog.set_level("INFO")
    trainer = trainer_of(resnet18(num_classes=3))
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    with pytest.raises(CheckpointError, match=r"shape: fc\.weight \(7, 512\) for \(3, 512\), fc\."):
        take_first_weights(trainer, RunOptions(init_from=str(resnet_file)))
    assert all(torch.equal(before[name], weight) for name, weight in trainer.weights().items())
    options = RunOptions(init_from=str(resnet_file), init_from_except=["fc.*"])
    take_first_weights(trainer, options)
    assert_taken(trainer, torch.load(resnet_file, weights_only=True), but="fc.")
    assert torch.equal(trainer.weights()["fc.weight"], before["fc.weight"])
    assert caplog.messages == [
        f"weights taken from {resnet_file}, except fc.*: 22 parameters are rounded to float16",
        "init_from: with their first values: fc.weight, fc.bias",
        "init_from: not used: fc.weight, fc.bias",
    ]


def test_a_run_starts_from_a_run_or_a_file_and_its_average_too(tmp_path: Path) -> None:
    small = ["experiment=digits_mlp", "trainer.max_steps=2"]
    train(tmp_path / "run", *small)
    saved = weights_of(checkpoint.load(tmp_path / "run"), "trained", tmp_path)
    file = tmp_path / "own.safetensors"
    save_file({f"net.{name}": tensor for name, tensor in saved.items()}, file)
    still = [*small, "optimizer=sgd", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    still += ["trainer.ema_decay=0.5"]
    for number, words in enumerate(
        [
            [f"init_from={tmp_path / 'run'}", "dtype=mixed_bf16"],
            [f"init_from={file}", "init_from_names={net.*:'*'}"],
        ]
    ):
        train(tmp_path / str(number), *still, *words)
        state = checkpoint.load(tmp_path / str(number))
        for kind in ("trained", "ema"):
            for name, tensor in weights_of(state, kind, tmp_path).items():
                assert torch.equal(tensor, saved[name])
