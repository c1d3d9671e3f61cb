"""init_from with weights that torchvision, timm and Hugging Face wrote in their own process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import StartRun
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import resnet18

from mpframe import Precision, Trainer, checkpoint
from mpframe.checkpoint.init_from import read_foreign
from mpframe.checkpoint.state import weights_of
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.schema import RunOptions
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.core.objective import supervised
from mpframe.core.tree import HALF
from mpframe.run.resume import take_first_weights

MODES = ["fp32", "mixed", "amp"]


def trainer_of(model: nn.Module, mode: str = "mixed") -> Trainer:
    precision = Precision(mode)  # type: ignore[arg-type]
    prepared, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    objective = supervised(nn.CrossEntropyLoss())
    return Trainer(prepared, optimizer, objective, precision)


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


SIZES = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
OTHERS = f"""
import importlib.util, torch, torchvision
torch.manual_seed(3)
model = torchvision.models.resnet18(num_classes=7)
model(torch.rand(2, 3, 32, 32))  # The statistics of BatchNorm move.
torch.save(model.state_dict(), 'resnet18.pth')
if importlib.util.find_spec('timm'):
    import timm
    model = timm.create_model('test_convnext', num_classes=7)
    state = {{'module.' + name: tensor for name, tensor in model.state_dict().items()}}
    torch.save({{'epoch': 3, 'state_dict': state, 'arch': 'test'}}, 'checkpoint.pth.tar')
if importlib.util.find_spec('transformers'):
    import transformers
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{SIZES}))
    for dtype in ('float32', 'bfloat16'):
        model.to(getattr(torch, dtype)).save_pretrained(dtype, max_shard_size='10KB')
"""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights that were saved by a process that knows nothing of mpframe."""
    folder = tmp_path_factory.mktemp("others")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", OTHERS], cwd=folder, env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def torchvision_file(others: Path) -> Path:
    return others / "resnet18.pth"


@pytest.mark.parametrize("mode", MODES)
def test_torchvisions_resnet18_is_taken_bit_for_bit(mode: str, torchvision_file: Path) -> None:
    saved = torch.load(torchvision_file, weights_only=True)
    assert saved["bn1.num_batches_tracked"] == 1
    trainer = trainer_of(resnet18(num_classes=7), mode)
    take_first_weights(trainer, RunOptions(init_from=str(torchvision_file)))
    assert_taken(trainer, saved)
    half = [p for p in trainer.model.parameters() if p.dtype in HALF]
    assert bool(half) == (mode == "mixed")


def test_a_new_head_keeps_its_first_values(
    torchvision_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer = trainer_of(resnet18(num_classes=3))
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    options = RunOptions(init_from=str(torchvision_file), init_from_except=["fc.*"])
    take_first_weights(trainer, options)
    assert_taken(trainer, torch.load(torchvision_file, weights_only=True), but="fc.")
    assert torch.equal(trainer.weights()["fc.weight"], before["fc.weight"])
    assert "init_from: with their first values: fc.weight, fc.bias" in caplog.messages
    assert "init_from: not used: fc.weight, fc.bias" in caplog.messages


def test_what_does_not_fit_is_refused_and_nothing_is_taken(torchvision_file: Path) -> None:
    trainer = trainer_of(resnet18(num_classes=3))
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    with pytest.raises(CheckpointError) as refused:
        take_first_weights(trainer, RunOptions(init_from=str(torchvision_file)))
    assert str(refused.value) == (
        f"init_from={torchvision_file}: of another shape: fc.weight (7, 512) for (3, 512), fc.bias "
        "(7,) for (3,); use the model it was made with, or name what may differ: "
        "init_from_except=[fc.*]"
    )
    assert all(torch.equal(before[name], weight) for name, weight in trainer.weights().items())


class Encoder(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder


def test_names_are_changed_by_pattern(torchvision_file: Path) -> None:
    model = Encoder(resnet18(num_classes=7))
    trainer = trainer_of(model)
    options = RunOptions(init_from=str(torchvision_file))
    with pytest.raises(CheckpointError, match=r"init_from_names=\{\*:encoder\.\*\}"):
        take_first_weights(trainer, options)
    take_first_weights(
        trainer, RunOptions(init_from=str(torchvision_file), init_from_names={"*": "encoder.*"})
    )
    saved = torch.load(torchvision_file, weights_only=True)
    assert_taken(trainer, {f"encoder.{name}": tensor for name, tensor in saved.items()})


@pytest.mark.parametrize("half", HALF)
def test_half_files_are_widened_exactly_and_the_log_says_so(
    half: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    saved = {name: tensor.to(half) for name, tensor in model.state_dict().items()}
    save_file(saved, tmp_path / "model.safetensors")
    trainer = trainer_of(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    take_first_weights(trainer, RunOptions(init_from=str(tmp_path)))
    assert_taken(trainer, saved)
    name = str(half).removeprefix("torch.")
    assert (
        f"init_from: 4 tensors are {name}, and were widened exactly: masters start from half values"
        in caplog.messages
    )


def test_a_timm_model_is_taken(others: Path, caplog: pytest.LogCaptureFixture) -> None:
    timm: Any = pytest.importorskip("timm")
    caplog.set_level("INFO")
    path = others / "checkpoint.pth.tar"
    trainer = trainer_of(timm.create_model("test_convnext", num_classes=7))
    take_first_weights(trainer, RunOptions(init_from=str(path)))
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert_taken(trainer, {n.removeprefix("module."): tensor for n, tensor in saved.items()})
    assert "init_from: other entries of the file, not used: arch, epoch" in caplog.messages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_model_of_hugging_face_is_taken(dtype: str, others: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    saved = others / dtype
    assert len(list(saved.glob("*.safetensors"))) > 1
    trainer = trainer_of(transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)))
    take_first_weights(trainer, RunOptions(init_from=str(saved)))
    tensors = read_foreign(saved).tensors
    assert "lm_head.weight" not in tensors  # It is tied to the embedding, and saved once.
    assert_taken(trainer, tensors)
    assert torch.equal(
        trainer.weights()["lm_head.weight"], tensors["transformer.wte.weight"].float()
    )


def test_a_run_starts_from_a_file_and_its_average_too(start_run: StartRun, tmp_path: Path) -> None:
    """An export of ours is a file of weights, too."""
    small = ["experiment=digits_mlp", "trainer.max_steps=2"]
    start_run(tmp_path / "source", *small)
    saved = weights_of(checkpoint.load(tmp_path / "source"), "trained", tmp_path)
    save_file(
        {f"net.{name}": tensor for name, tensor in saved.items()}, tmp_path / "own.safetensors"
    )
    still = [*small, "optimizer=sgd", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    start_run(
        tmp_path / "taken", *still, f"init_from={tmp_path / 'own.safetensors'}",
        "init_from_names={net.*:'*'}", "trainer.ema_decay=0.5",
    )  # fmt: skip
    state = checkpoint.load(tmp_path / "taken")
    for kind in ("trained", "ema"):
        for name, tensor in weights_of(state, kind, tmp_path).items():
            assert torch.equal(tensor, saved[name])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["init_from_names={a.*:b.*}"], "init_from_names={'a.*': 'b.*'}: only works with init_from; give both"),
        (["init_from=x", "init_from_names={a:[b]}"], "init_from_names={a: ['b']}: must map a word to a word"),
        (["init_from=x", "init_from_names=3"], "init_from_names=3: must be a mapping of words to words, or null"),
    ],
)  # fmt: skip
def test_names_that_are_no_mapping_are_refused(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(without_hydra(compose_named(words)[1]))
    assert str(refused.value) == line
