"""Resume: bit for bit the undisturbed run, whatever was on; and in another precision."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, Patch
from in_process import assert_same_run, cut, differing, train, trained
from omegaconf import OmegaConf
from torch import nn

from mpframe import Backoff, Precision, Trainer, checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.core.errors import CheckpointError
from mpframe.core.objective import supervised
from mpframe.run.resume import compare, load_state
from mpframe.training.callbacks.ema import Ema, ema_of

# 11 steps an epoch; the fourth and the fourteenth step lie within an epoch, and a validation within
# no epoch's end. Everything that has a state is on.
EVERYTHING = [
    "model._target_=own_parts.NoisyNet", "dataset.augment=crop", "trainer.accumulate=2",
    "trainer.epochs=2", "trainer.max_steps=16", "trainer.ema_decay=0.9", "trainer.clip_norm=1.0",
    "trainer.log_every=1", "trainer.checkpoint_every=4", "trainer.keep_last=100",
    "trainer.eval_every=3", "optimizer.lr=0.01",
]  # fmt: skip
EVERY_FOURTH_STEP = [*EVERYTHING, "trainer.keep_best=0"]  # And no best ones between them.
# Skips, grows and backs off before and after the cut.
BACKOFF = [
    "loss_scaling=Backoff", "loss_scaling.init_scale=1e30", "loss_scaling.max_scale=1e30",
    "loss_scaling.growth_interval=2", "loss_scaling.backoff_factor=1e-8",
]  # fmt: skip
whole = trained(*EVERY_FOURTH_STEP)


@pytest.mark.parametrize(
    ("options", "at"),
    [
        # In the first epoch, in the second, and at a validation's step.
        (["dtype=fp32", "loss_scaling=none", "trainer.async_save=true"], 12),
        (["dtype=mixed", *BACKOFF], 4),
        (["dtype=amp", "loss_scaling=LogMax"], 8),
    ],
    ids=["fp32 with workers", "mixed skipping", "amp LogMax"],
)
def test_a_run_may_be_cut_anywhere(tmp_path: Path, options: list[str], at: int) -> None:
    train(tmp_path / "whole", *EVERYTHING, *options)
    folder = cut(tmp_path / "whole", tmp_path / "resumed", at)
    workers = ["dataset.workers=2"] * ("dtype=fp32" in options)
    train(folder, *EVERYTHING, *options, *workers, "resume=auto")
    assert_same_run(tmp_path / "whole", folder)


def test_auto_sets_bad_ones_aside_or_refuses_if_all_are(whole: Path, tmp_path: Path) -> None:
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    for path in checkpoint.all_in(resumed)[-2:]:
        (path / "state.pt").write_bytes(b"")
    train(resumed, *EVERY_FOURTH_STEP, "resume=auto")
    assert_same_run(whole, resumed)
    assert (resumed / "checkpoints/step_00000016.set_aside").exists()
    for path in checkpoint.all_in(resumed):
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of the 4 checkpoints in \S+ can be used"):
        train(resumed, *EVERY_FOURTH_STEP, "resume=auto")


def test_what_forbids_exactness_and_what_is_not_used_are_named(
    whole: Path, tmp_path: Path, caplog: Log, monkeypatch: Patch
) -> None:
    """Options, torch and the number of threads; those the checkpoint holds do not count."""
    resumed = cut(whole, tmp_path / "resumed")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "__version__", "2.99")
    changed = ["seed=1", "trainer.clip_norm=2", "optimizer.lr=0.5", "trainer.max_steps=5"]
    train(resumed, *EVERY_FOURTH_STEP, *changed, "resume=auto")
    (line,) = (line for line in caplog.messages if "bit for bit" in line)
    options = r".*seed=1 \(was 0\).*trainer\.clip_norm=2\.0 \(was 1\.0\)"
    machine = r"torch=2\.99 \(was \S+\), threads=7 \(was \d+\)$"
    assert re.search(rf"uninterrupted one bit for bit: {options}.*{machine}", line), line
    assert (
        "warning: not used, because the checkpoint holds its own: optimizer.lr=0.5 (goes on with "
        "0.01); start a new run with init_from to change it"
    ) in caplog.messages


def test_an_option_forbids_exactness_where_it_changes_a_number() -> None:
    for schedule, change, said in (
        ("some.Cosine", "trainer.epochs=3", ["trainer.epochs=3 (was 2)"]),
        (None, "trainer.epochs=3", []),  # Of a schedule only the length decides.
        ("some.Cosine", "dataset.workers=1", []),
        ("a.ReduceLROnPlateau", "trainer.eval_every=5", ["trainer.eval_every=5 (was 3)"]),
    ):
        options = ["trainer.epochs=2", "trainer.eval_every=3", "dataset.workers=0"]
        options += [f"scheduler._target_={schedule}"] if schedule else ["scheduler=null"]
        old, new = map(OmegaConf.from_dotlist, (options, [*options, change]))
        as_dicts: Any = OmegaConf.to_container(old), OmegaConf.to_container(new)
        assert compare(*as_dicts) == (said, [])


def test_the_same_options_are_not_warned_of(whole: Path, tmp_path: Path, caplog: Log) -> None:
    resumed = cut(whole, tmp_path / "resumed", 12)
    watching = ["trainer.log_every=5", "dataset.workers=1", "callbacks.ranges.every=50"]
    train(resumed, *EVERY_FOURTH_STEP, *watching, "resume=auto")
    assert [line for line in caplog.messages if line.startswith("warning")] == []


def make(name: str) -> Trainer:
    mode, _, half = name.rstrip(")").partition("(")
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    model = nn.Sequential(*layers)
    precision = Precision(mode, half or "float16")  # type: ignore[arg-type]
    model, masters = precision.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ema = Ema(model, {p: masters.master_of(p) for p in model.parameters()}, 0.9)
    scaler = Backoff(init_scale=1024.0) if half == "float16" else None
    objective = supervised(nn.CrossEntropyLoss())
    algorithms = {"ema": ema}
    return Trainer(model, masters, objective, precision, scaler=scaler, algorithms=algorithms)


def stepped(name: str) -> Trainer:
    trainer = make(name)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        inputs = torch.randn(8, 1, 8, 8, generator=generator)
        trainer.train_step((inputs, torch.randint(0, 10, (8,), generator=generator)))
    return trainer


PAIRS = [("fp32", "fp32"), ("amp(float16)", "mixed(bfloat16)"), ("fp32", "mixed(float16)"),
         ("mixed(float16)", "fp32")]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_each_loads_the_others_checkpoint(
    source: str, target: str, tmp_path: Path, caplog: Log
) -> None:
    checkpoint.save(tmp_path, Snapshot(5, {"trainer": stepped(source).state_dict()}))
    saved, loaded = checkpoint.load(tmp_path)["trainer"], make(target)
    with caplog.at_level("INFO"):
        load_state(loaded, copy.deepcopy(saved))
    now = loaded.state_dict()
    for part in ("weights", "optimizer", "ema", "progress"):
        assert not differing(saved[part], now[part])
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, saved["weights"][name].to(tensor.dtype)), name
    half = target[6:-1] if target.startswith("mixed") else ""
    rounded = f"4 parameters are rounded to {half}" if half else "no parameter is rounded"
    start = f"checkpoint of {source} taken into {target}: masters and optimizer state as they were,"
    line = "".join(caplog.messages)
    assert line.startswith(f"{start} {rounded}") if source != target else line == ""
    scaled = ["(float16)" in name for name in (source, target)]
    assert ("its loss scale is not used" in line) == (scaled == [True, False])
    assert ("the loss scale starts at its initial value" in line) == (scaled == [False, True])
    assert torch.isfinite(loaded.train_step((torch.randn(4, 1, 8, 8), torch.arange(4))).loss)


def test_the_average_starts_from_weights_that_are_loaded() -> None:
    """Those beyond float16 as well, which the master keeps."""
    source, target = stepped("fp32"), make("mixed(float16)")
    source.model[4].weight.data[0, :3] = torch.tensor([1e6, -1e6, 65519.0])
    target.load_weights(source.weights())
    assert target.model[4].weight[0, :3].tolist() == [65504.0, -65504.0, 65504.0]
    assert target.weights()["4.weight"][0, :3].tolist() == [1e6, -1e6, 65519.0]
    for name, average in ema_of(target).by_name().items():  # type: ignore[union-attr]
        assert torch.equal(average, source.weights()[name])
