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
in_modes = pytest.mark.parametrize(("mode", "half", "kind"), MODES, ids=str)


def samples(count: int) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 12, generator=made)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=made))


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
    batches, skipped = list(DataLoader(samples(BATCH * STEPS * window), BATCH)), []
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


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0)


def own_loop(mixed: MixedPrecision, window: int, model: nn.Module) -> tuple[Any, list[bool]]:
    (optimizer,), skipped = mixed.prepare(model, adamw(model)), []
    for number, batch in enumerate(DataLoader(samples(BATCH * STEPS * window), BATCH)):
        mixed.note_batch(batch, lambda model, batch: loss_of(model, *batch), 1, number)
        with mixed.forward():
            loss = loss_of(model, *batch) / window
        mixed.scale(loss).backward()  # type: ignore[no-untyped-call]
        if (number + 1) % window == 0:
            skipped.append(bool(mixed.step(optimizer, max_norm=NORM).skipped))
    return optimizer, skipped


@in_modes
@pytest.mark.parametrize("window", [1, 3])
def test_a_loop_takes_the_same_steps(mode: str, half: str, kind: Any, window: int) -> None:
    expected, skipped = by_hand(mixed_of(mode, half, kind), window)
    model, mixed = network(), mixed_of(mode, half, kind)
    optimizer, found = own_loop(mixed, window, model)
    assert_same(state_of(model, optimizer), expected)
    assert found == skipped
    other = mixed_of(mode, half, kind)
    other.load_state_dict(copy.deepcopy(mixed.state_dict()))
    assert torch.equal(other.scaler.scale, mixed.scaler.scale)


@pytest.mark.parametrize("after", [0, 3, 4])
def test_a_row_of_skipped_steps_is_explained(after: int, caplog: pytest.LogCaptureFixture) -> None:
    mixed = MixedPrecision("mixed", scaler=Backoff(2.0**8), autopsy=after)
    _, skipped = own_loop(mixed, 1, overflowing())
    assert skipped == [True] * STEPS
    assert caplog.text.count("activation beyond float16 in 3") == (after > 0)
    where = ("3 (Linear), op linear, forward pass", f"of 8), epoch 1, batch {after - 1}")
    assert all(one in str(mixed.report) for one in where) == (after > 0)


def lightning_run(
    mixed: MixedPrecision,
    window: int,
    folder: Path,
    epochs: int = 1,
    start: Path | None = None,
    made: Any = network,
    callbacks: Any = None,
) -> Any:
    """The trainer after a run, and which steps were skipped."""
    from lightning.pytorch import LightningModule, Trainer

    from mpframe.integrations.lightning import MpframePrecision

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.skipped = made(), list[bool]()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_of(self.net, *batch)

        def configure_optimizers(self) -> Any:
            return adamw(self.net)

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if (number + 1) % window == 0:
                assert plugin.mixed.result is not None
                self.skipped.append(bool(plugin.mixed.result.skipped))

    plugin, module = MpframePrecision(), Module()
    plugin.mixed = mixed
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(
        accelerator="cpu", plugins=plugin, callbacks=callbacks, accumulate_grad_batches=window,
        gradient_clip_val=NORM, max_epochs=epochs, default_root_dir=folder,
        enable_checkpointing=False, **quiet,
    )  # fmt: skip
    batches = DataLoader(samples(BATCH * STEPS * window), BATCH)
    trainer.fit(module, batches, ckpt_path=start, weights_only=False)
    return trainer, module.skipped


@in_modes
@pytest.mark.parametrize("window", [1, 3])
def test_lightning_takes_the_same_steps(
    tmp_path: Path, mode: str, half: str, kind: Any, window: int
) -> None:
    pytest.importorskip("lightning")
    expected, skipped = by_hand(mixed_of(mode, half, kind), window)
    trainer, found = lightning_run(mixed_of(mode, half, kind), window, tmp_path)
    assert_same(state_of(trainer.lightning_module.net, trainer.optimizers[0]), expected)
    assert found == skipped
    assert any(skipped) == (kind is not None)
    assert not all(skipped)


@pytest.mark.parametrize("kind", [LogMax, Backoff])
def test_lightning_goes_on_from_its_checkpoint(tmp_path: Path, kind: type[Scaler]) -> None:
    pytest.importorskip("lightning")
    made = partial(mixed_of, "mixed", "float16", kind)
    whole, _ = lightning_run(made(), 1, tmp_path, epochs=2)
    first, _ = lightning_run(made(), 1, tmp_path)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = made()
    second, _ = lightning_run(resumed, 1, tmp_path, 2, tmp_path / "half.ckpt")
    assert second.global_step == whole.global_step == 2 * STEPS
    assert_same(
        state_of(second.lightning_module.net, second.optimizers[0]),
        state_of(whole.lightning_module.net, whole.optimizers[0]),
    )
    assert resumed.scaler.scale < FIRST


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


@in_modes
@pytest.mark.parametrize("window", [1, 3])
def test_accelerate_takes_the_same_steps(mode: str, half: str, kind: Any, window: int) -> None:
    parts = with_accelerate(mixed_of(mode, half, kind), window)
    found, skipped = accelerated(parts, list(DataLoader(samples(BATCH * STEPS * window), BATCH)))
    expected, skips = by_hand(mixed_of(mode, half, kind), window)
    assert_same(found, expected)
    assert skipped == skips


def test_accelerate_goes_on_from_its_state(tmp_path: Path) -> None:
    batches = list(DataLoader(samples(BATCH * STEPS), BATCH))
    made = partial(mixed_of, "mixed", "float16", LogMax)
    whole, first, second = (with_accelerate(made(), 1) for _ in range(3))
    accelerated(first, batches[:4])
    first[0].save_state(tmp_path)
    second[0].load_state(tmp_path)
    assert_same(accelerated(second, batches[4:])[0], accelerated(whole, batches)[0])


def test_what_accelerate_would_do_twice_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    from mpframe.integrations.accelerate import prepare

    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = network()
    said = refused(ConfigError, lambda: prepare(accelerator, MixedPrecision(), model, adamw(model)))
    accelerate.state.AcceleratorState._reset_state()
    assert "mixed_precision=bf16: both would cast; leave it out" in said


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, inputs, labels)}


def huggingface_run(mixed: MixedPrecision, window: int, folder: Path, **options: Any) -> Any:
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
        **{k: v for k, v in options.items() if k != "resume_from_checkpoint"},
    )  # fmt: skip
    trainer = InOrder(model=WithLoss(), args=arguments, train_dataset=data, mixed=mixed)
    trainer.skipped = []

    class Noted(transformers.TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            trainer.skipped.append(trainer.accelerator.optimizer_step_was_skipped)

    trainer.add_callback(Noted())
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return trainer


@in_modes
@pytest.mark.parametrize("window", [1, 3])
def test_hugging_face_takes_the_same_steps(
    tmp_path: Path, mode: str, half: str, kind: Any, window: int
) -> None:
    expected, skipped = by_hand(mixed_of(mode, half, kind), window)
    trainer = huggingface_run(mixed_of(mode, half, kind), window, tmp_path)
    assert_same(state_of(trainer.model.net, trainer.optimizer.optimizer), expected)
    assert trainer.skipped == skipped
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert len(norms) == STEPS
    assert norms[-1] == trainer.mixed.result.grad_norm.item()


def test_hugging_face_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = huggingface_run(mixed_of("mixed", "float16", LogMax), 1, tmp_path)
    halfway = str(tmp_path / "checkpoint-3")
    resumed = mixed_of("mixed", "float16", LogMax)
    second = huggingface_run(resumed, 1, tmp_path / "on", resume_from_checkpoint=halfway)
    assert_same(
        state_of(second.model.net, second.optimizer.optimizer),
        state_of(whole.model.net, whole.optimizer.optimizer),
    )
    assert len(second.skipped) == STEPS - 3


def test_lightning_explains_a_row_of_skipped_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    from mpframe.integrations.lightning import Autopsy

    mixed = MixedPrecision("mixed", "float16", Backoff(2.0**8), autopsy=4)
    _, skipped = lightning_run(mixed, 1, tmp_path, made=overflowing, callbacks=[Autopsy()])
    assert skipped == [True] * STEPS
    where = "net.3 (Linear), op linear, forward pass"
    for said in (where, "(8 of 8), epoch 0, batch 3", "ops.modules={net.3:fp32}"):
        assert said in str(mixed.report)
    assert caplog.text.count("autopsy of step 4: activation beyond float16 in net.3") == 1


def code_of(diff: str) -> str:
    """What the page's change leaves; at most ten lines are new."""
    lines = diff.splitlines()
    assert sum(line.startswith("+") and len(line) > 1 for line in lines) <= 10
    return "\n".join(line[1:] for line in lines if not line.startswith("-"))


def test_the_page_shows_changes_that_run(tmp_path: Path) -> None:
    for package in ("lightning", "transformers", "accelerate"):
        pytest.importorskip(package)
    from lightning.pytorch import LightningModule, Trainer
    from transformers import TrainingArguments

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_of(self.net, *batch)

        def configure_optimizers(self) -> Any:
            return adamw(self.net)

    quiet = {"enable_progress_bar": False, "logger": False, "default_root_dir": tmp_path}
    batches, model = DataLoader(samples(4 * BATCH), BATCH), WithLoss()
    given: list[dict[str, Any]] = [
        {"Trainer": partial(Trainer, accelerator="cpu", **quiet), "module": Module()},
        {
            "model": model,
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
        names["batches"] = batches
        exec(code_of(diff), names)
        mixed = names["mixed"] if "mixed" in names else names["precision"].mixed
        assert mixed.result is not None, diff
        assert mixed.scaler.kind == "LogMax"
