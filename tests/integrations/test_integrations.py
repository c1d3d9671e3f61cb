"""Lightning, Accelerate and Hugging Face's Trainer take the steps of a loop by hand."""

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkout import ROOT
from fixtures import refused
from pages import Page
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from vocabulary import same_bits

from mpframe import Backoff, LogMax
from mpframe.core.errors import ConfigError
from mpframe.core.loss_scaling.scaler import Scaler
from mpframe.integrations.mixed_precision import MixedPrecision

OF_THE_LIBRARIES = ("UserWarning", "DeprecationWarning", "FutureWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in OF_THE_LIBRARIES]
BATCH, STEPS, NORM = 8, 6, 0.5
FIRST = 2.0**18  # Its first steps overflow.
MODES = [
    ("mixed", "float16", LogMax),
    ("mixed", "float16", Backoff),
    ("amp", "float16", Backoff),
    ("amp", "bfloat16", None),
    ("mixed", "bfloat16", None),
    ("fp32", "float16", None),
]


def samples(count: int) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 12, generator=made)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=made))


def batches_of(window: int) -> DataLoader[Any]:
    return DataLoader(samples(BATCH * STEPS * window), BATCH)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 3))


def overflowing() -> nn.Module:
    """The last layer's outputs do not fit into float16."""
    model: Any = network()
    with torch.no_grad():
        model[3].weight.fill_(2.0**15)
    return model  # type: ignore[no-any-return]


def mixed_of(mode: str, half: str, kind: Any) -> MixedPrecision:
    return MixedPrecision(mode, half, kind and kind(FIRST))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return 16 * F.cross_entropy(model(inputs), targets)


def by_hand(mixed: MixedPrecision, window: int) -> tuple[list[Tensor], list[bool]]:
    """The weights and buffers after the steps, and which were skipped, by the parts of the core."""
    model = network()
    model, optimizer = mixed.precision.prepare(model, adamw(model))
    scaler: Any = mixed.scaler if isinstance(mixed.scaler, LogMax | Backoff) else None
    batches, skipped = list(batches_of(window)), []
    for first in range(0, len(batches), window):
        before = copy.deepcopy(dict(model.named_buffers()))
        for number, (inputs, targets) in enumerate(batches[first : first + window]):
            with mixed.precision.cast():
                loss = loss_of(model, inputs, targets) / window
            (loss * scaler.scale if scaler else loss).backward()
            for parameter in model.parameters() if number < window - 1 else ():
                master = optimizer.optimizer_param(parameter)
                if master is not parameter and parameter.grad is not None:
                    wide = parameter.grad.float()
                    master.grad = wide if master.grad is None else master.grad + wide
                    parameter.grad = None
        skipped.append(bool(optimizer.step(scaler, max_norm=NORM).skipped))
        for name, buffer in model.named_buffers() if skipped[-1] else ():
            buffer.copy_(before[name])
    return state_of(model, optimizer), skipped


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def state_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    masters = [optimizer.master_of(parameter) for parameter in model.parameters()]
    return [tensor.detach().clone() for tensor in [*model.state_dict().values(), *masters]]


def own_loop(mixed: MixedPrecision, window: int, model: nn.Module) -> tuple[Any, list[bool]]:
    (optimizer,), skipped = mixed.prepare(model, adamw(model)), []
    for number, batch in enumerate(batches_of(window)):
        mixed.note_batch(batch, lambda model, batch: loss_of(model, *batch), 1, number)
        with mixed.forward():
            loss = loss_of(model, *batch) / window
        mixed.scale(loss).backward()  # type: ignore[no-untyped-call]
        if (number + 1) % window == 0:
            skipped.append(bool(mixed.step(optimizer, max_norm=NORM).skipped))
    return optimizer, skipped


def lightning_module(model: nn.Module) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.skipped = model, list[bool]()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_of(self.net, *batch)

        def configure_optimizers(self) -> Any:
            return adamw(self.net)

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if (number + 1) % self.trainer.accumulate_grad_batches == 0:
                self.skipped.append(bool(self.trainer.precision_plugin.mixed.result.skipped))

    return Module()


def lightning_run(
    mixed: MixedPrecision, window: int, folder: Path, epochs: int = 1, start: Path | None = None,
    model: nn.Module | None = None, callbacks: Any = None,
) -> Any:  # fmt: skip
    """The trainer after a run."""
    from lightning.pytorch import Trainer

    from mpframe.integrations.lightning import MpframePrecision

    plugin, module = MpframePrecision(), lightning_module(model or network())
    plugin.mixed = mixed
    trainer = Trainer(
        accelerator="cpu", plugins=plugin, callbacks=callbacks, accumulate_grad_batches=window,
        gradient_clip_val=NORM, max_epochs=epochs, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, batches_of(window), ckpt_path=start, weights_only=False)
    return trainer


def of_lightning(trainer: Any) -> tuple[list[Tensor], list[bool]]:
    module = trainer.lightning_module
    return state_of(module.net, trainer.optimizers[0]), module.skipped


def with_accelerate(mixed: MixedPrecision, window: int) -> tuple[Any, MixedPrecision, Any, Any]:
    accelerate = pytest.importorskip("accelerate")
    from mpframe.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=window)
    model = network()
    return accelerator, mixed, *prepare(accelerator, mixed, model, adamw(model))


def accelerated(parts: tuple[Any, ...], batches: Sequence[Any]) -> tuple[list[Tensor], list[bool]]:
    """The state after the steps, and which were skipped."""
    (accelerator, mixed, model, optimizer), skipped = parts, []
    for batch in batches:
        with accelerator.accumulate(model):
            with mixed.forward():
                loss = loss_of(model, *batch)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            if accelerator.sync_gradients:
                torch.testing.assert_close(norm, mixed.result.grad_norm, equal_nan=True)
                skipped.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
    return state_of(model, optimizer.optimizer), skipped


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, inputs, labels)}


def huggingface_run(
    mixed: MixedPrecision, window: int, folder: Path, start: Path | None = None
) -> Any:
    pytest.importorskip("accelerate")  # transformers' Trainer needs it.
    transformers = pytest.importorskip("transformers")
    from mpframe.integrations.transformers import MpframeTrainer

    class InOrder(MpframeTrainer):  # type: ignore[misc]
        skipped: list[bool]

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = adamw(self.model)
            return super().create_optimizer(model)

    data = [{"inputs": x, "labels": y} for x, y in samples(BATCH * STEPS * window)]
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=window, use_cpu=True,
        num_train_epochs=1, max_grad_norm=NORM, lr_scheduler_type="constant", report_to=[],
        save_strategy="steps", save_steps=3, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = InOrder(model=WithLoss(), args=arguments, train_dataset=data, mixed=mixed)
    trainer.skipped = []

    class Noted(transformers.TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            trainer.skipped.append(trainer.accelerator.optimizer_step_was_skipped)

    trainer.add_callback(Noted())
    trainer.train(resume_from_checkpoint=start and str(start))
    return trainer


def of_hugging_face(trainer: Any) -> tuple[list[Tensor], list[bool]]:
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert norms[-1] == trainer.mixed.result.grad_norm.item()
    return state_of(trainer.model.net, trainer.optimizer.optimizer), trainer.skipped


def run(library: str, mixed: MixedPrecision, window: int, folder: Path) -> Any:
    """The state after a run, and which of its steps were skipped."""
    if library == "a_loop":
        optimizer, skipped = own_loop(mixed, window, model := network())
        return state_of(model, optimizer), skipped
    pytest.importorskip("accelerate" if library == "transformers" else library)
    if library == "lightning":
        return of_lightning(lightning_run(mixed, window, folder))
    if library == "transformers":
        return of_hugging_face(huggingface_run(mixed, window, folder))
    return accelerated(with_accelerate(mixed, window), list(batches_of(window)))


@pytest.mark.parametrize(("mode", "half", "kind"), MODES, ids=str)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("library", ["a_loop", "lightning", "accelerate", "transformers"])
def test_it_takes_the_same_steps(
    library: str, window: int, mode: str, half: str, kind: Any, tmp_path: Path
) -> None:
    expected, skipped = by_hand(mixed_of(mode, half, kind), window)
    mixed, other = (mixed_of(mode, half, kind) for _ in range(2))
    found, skips = run(library, mixed, window, tmp_path)
    assert same_bits(found, expected)
    assert skips == skipped
    assert any(skipped) == (kind is not None)
    assert not all(skipped)
    other.load_state_dict(copy.deepcopy(mixed.state_dict()))
    assert torch.equal(other.scaler.scale, mixed.scaler.scale)


@pytest.mark.parametrize("kind", [LogMax, Backoff])
def test_lightning_goes_on_from_its_checkpoint(tmp_path: Path, kind: type[Scaler]) -> None:
    pytest.importorskip("lightning")
    made = partial(mixed_of, "mixed", "float16", kind)
    whole, first = (lightning_run(made(), 1, tmp_path, epochs) for epochs in (2, 1))
    first.save_checkpoint(tmp_path / "half.ckpt")
    second = lightning_run(made(), 1, tmp_path, 2, tmp_path / "half.ckpt")
    assert second.global_step == whole.global_step == 2 * STEPS
    assert same_bits(of_lightning(second)[0], of_lightning(whole)[0])


def test_accelerate_goes_on_from_its_state(tmp_path: Path) -> None:
    batches, made = list(batches_of(1)), partial(mixed_of, "mixed", "float16", LogMax)
    whole, first, second = (with_accelerate(made(), 1) for _ in range(3))
    accelerated(first, batches[:4])
    first[0].save_state(tmp_path)
    second[0].load_state(tmp_path)
    assert same_bits(accelerated(second, batches[4:])[0], accelerated(whole, batches)[0])


def test_hugging_face_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    made = partial(mixed_of, "mixed", "float16", LogMax)
    whole = huggingface_run(made(), 1, tmp_path)
    second = huggingface_run(made(), 1, tmp_path / "on", tmp_path / "checkpoint-3")
    assert same_bits(of_hugging_face(second)[0], of_hugging_face(whole)[0])
    assert len(second.skipped) == STEPS - 3


@pytest.mark.parametrize("after", [0, 3, 4])
def test_a_row_of_skipped_steps_is_explained(after: int, caplog: pytest.LogCaptureFixture) -> None:
    mixed = MixedPrecision("mixed", scaler=Backoff(2.0**8), autopsy=after)
    _, skipped = own_loop(mixed, 1, overflowing())
    assert skipped == [True] * STEPS
    assert caplog.text.count("activation beyond float16 in 3") == (after > 0)
    where = ("3, op linear, forward pass", f"of 8), epoch 1, batch {after - 1}")
    assert all(one in str(mixed.report) for one in where) == (after > 0)


def test_lightning_explains_a_row_of_skipped_steps(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from mpframe.integrations.lightning import Autopsy

    mixed = MixedPrecision("mixed", "float16", Backoff(2.0**8), autopsy=4)
    lightning_run(mixed, 1, tmp_path, model=overflowing(), callbacks=[Autopsy()])
    where = "net.3, op linear, forward pass"
    for said in (where, "(8 of 8), epoch 0, batch 3", "ops.modules={net.3:fp32}"):
        assert said in str(mixed.report)


def test_what_accelerate_would_do_twice_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    from mpframe.integrations.accelerate import prepare

    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = network()
    said = refused(ConfigError, lambda: prepare(accelerator, MixedPrecision(), model, adamw(model)))
    accelerate.state.AcceleratorState._reset_state()
    assert "mixed_precision=bf16: both would cast; leave it out" in said


def test_the_page_shows_changes_that_run(tmp_path: Path) -> None:
    for package in ("lightning", "transformers", "accelerate"):
        pytest.importorskip(package)
    from lightning.pytorch import Trainer
    from transformers import TrainingArguments

    quiet = {"enable_progress_bar": False, "logger": False, "default_root_dir": tmp_path}
    given: list[dict[str, Any]] = [
        {
            "Trainer": partial(Trainer, accelerator="cpu", **quiet),
            "module": lightning_module(network()),
        },
        {
            "model": WithLoss(),
            "samples": [{"inputs": x, "labels": y} for x, y in samples(4 * BATCH)],
            "arguments": TrainingArguments(tmp_path, use_cpu=True, report_to=[], max_steps=4),
        },
        {
            "model": (plain := network()),
            "optimizer": adamw(plain),
            "loss_of": lambda model, batch: loss_of(model, *batch),
        },
    ]
    diffs = Page(ROOT / "docs" / "integrations.md").blocks("diff")
    for diff, names in zip(diffs, given, strict=True):
        names["batches"] = DataLoader(samples(4 * BATCH), BATCH)
        exec("\n".join(line[1:] for line in diff.splitlines() if line[:1] != "-"), names)
        mixed = names["mixed"] if "mixed" in names else names["precision"].mixed
        assert mixed.result is not None, diff
        assert mixed.scaler.kind == "LogMax"
