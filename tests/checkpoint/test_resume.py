"""Resume: bit for bit the undisturbed run, whatever was on."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from fixtures import Log, Patch
from in_process import assert_same_run, cut, train, trained
from omegaconf import OmegaConf

from mpframe import checkpoint
from mpframe.core.errors import CheckpointError
from mpframe.run.resume import compare

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
# Delayed scales forward, stochastic rounding of the gradients.
GRADIENT = "{dy:{format:e2m1,rounding:stochastic}}"
PRODUCTS = [
    "dtype=mixed_bf16", "dtype.products=both",
    f"+dtype.recipes.both={{every:{{format:e4m3fn,history:3}},dx:{GRADIENT},dw:{GRADIENT}}}",
]  # fmt: skip


whole = trained(*EVERY_FOURTH_STEP)


@pytest.mark.parametrize(
    ("options", "at", "resumed"),
    [
        # In the first epoch, in the second, and at a validation's step.
        (["dtype=fp32", "loss_scaling=none", "trainer.async_save=true"], 12, ["dataset.workers=2"]),
        (["dtype=mixed", *BACKOFF], 4, []),
        (["dtype=amp", "loss_scaling=LogMax"], 8, []),
        (PRODUCTS, 4, []),
    ],
    ids=["fp32 with workers", "mixed skipping", "amp LogMax", "products"],
)
def test_a_run_may_be_cut_anywhere_and_equals_the_undisturbed_one(
    tmp_path: Path, options: list[str], at: int, resumed: list[str]
) -> None:
    train(tmp_path / "whole", *EVERYTHING, *options)
    folder = cut(tmp_path / "whole", tmp_path / "resumed", at)
    train(folder, *EVERYTHING, *options, *resumed, "resume=auto")
    assert_same_run(tmp_path / "whole", folder)
    if options is PRODUCTS:
        products = checkpoint.load(folder)["trainer"]["products"]
        assert products["generators"]
        assert any(name.endswith(" dy") for name in products["amax"])


def test_auto_names_each_bad_one_it_passes_over_and_refuses_if_all_are(
    whole: Path, tmp_path: Path, caplog: Log
) -> None:
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    places = checkpoint.all_in(resumed)
    (places[-1] / "state.pt").write_bytes(b"")
    (places[-2] / "manifest.json").unlink()
    train(resumed, *EVERY_FOURTH_STEP, "resume=auto")
    last, before = (line for line in caplog.messages if line.startswith("warning: resume=auto"))
    assert re.search(r"passes over step_00000016: .*state\.pt: damaged, 0 bytes instead", last)
    assert re.search(r"passes over step_00000012: .*no readable checkpoint", before)
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
    assert re.search(rf"undisturbed one bit for bit: {options}.*{machine}", line), line
    assert (
        "warning: not used, because the checkpoint holds its own: optimizer.lr=0.5 (goes on with "
        "0.01); start a new run with init_from to change it"
    ) in caplog.messages


@pytest.mark.parametrize(
    ("schedule", "change", "said"),
    [
        ("some.Cosine", "trainer.epochs=3", ["trainer.epochs=3 (was 2)"]),
        ("none", "trainer.epochs=3", []),  # Of a schedule only the length decides.
        ("some.Cosine", "dataset.workers=1", []),
        ("a.ReduceLROnPlateau", "trainer.eval_every=5", ["trainer.eval_every=5 (was 3)"]),
    ],
)
def test_an_option_forbids_exactness_where_it_changes_a_number(
    schedule: str, change: str, said: list[str]
) -> None:
    options = ["trainer.epochs=2", "trainer.eval_every=3", "dataset.workers=0"]
    options += ["scheduler=null" if schedule == "none" else f"scheduler._target_={schedule}"]
    old, new = (
        OmegaConf.to_container(OmegaConf.from_dotlist(words))
        for words in (options, [*options, change])
    )
    assert compare(old, new) == (said, [])  # type: ignore[arg-type]


def test_the_same_options_and_machine_are_not_warned_of(
    whole: Path, tmp_path: Path, caplog: Log
) -> None:
    resumed = cut(whole, tmp_path / "resumed")
    watching = ["trainer.log_every=5", "dataset.workers=1", "numerics=on", "numerics.every=50"]
    train(resumed, *EVERY_FOURTH_STEP, *watching, "resume=auto")
    assert [line for line in caplog.messages if line.startswith("warning")] == []
