"""Resume: bit for bit the undisturbed run, whatever was on, and nothing that is saved is idle."""

import copy
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, Patch
from in_process import composed, train
from omegaconf import OmegaConf
from sameness import MEASURED, assert_same_run, cut, differing, results

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.config.command_line import check_config
from mpframe.core.errors import CheckpointError
from mpframe.run.resume import compare
from mpframe.run.run import Run
from mpframe.training.trainer import Trainer

# 11 steps an epoch; the fourth and the fourteenth step lie within an epoch, and a validation within
# no epoch's end. Everything that has a state is on.
EVERYTHING = [
    "model._target_=noisy.NoisyNet", "dataset.augment=crop", "trainer.accumulate=2",
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, *EVERY_FOURTH_STEP)
    return folder


@pytest.mark.parametrize(
    ("options", "at", "resumed"),
    [
        # In the first epoch, in the second, at a validation's step, and after the last step.
        (["dtype=fp32", "loss_scaling=none", "trainer.async_save=true"], 12, ["dataset.workers=2"]),
        (["dtype=mixed", *BACKOFF], 4, []),
        (["dtype=amp", "loss_scaling=LogMax"], 8, []),
        (["dtype=mixed", "loss_scaling=static"], 16, []),
        (PRODUCTS, 4, []),
    ],
    ids=["fp32 with workers", "mixed skipping", "amp LogMax", "at the end", "products"],
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


DEEPER = [("trainer",), ("rng",), ("callbacks",)]
DEEPER += [("trainer", part) for part in ("scaler", "progress", "optimizer")]


def items(state: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The parts of a saved state, and the single entries of its counters."""
    if path in [(), *DEEPER]:
        return [item for key in state for item in items(state[key], (*path, key))]
    return [path]


def ends(folder: Path, start: int) -> dict[str, Any]:
    """What a run came to, its curves from step `start` on; the amax record tells less."""
    found = results(folder)
    tails = {tag: [p for p in curve if p[0] >= start] for tag, curve in found["curves"].items()}
    # What `fresh` and `saved` differ in at the last step was not trained on, only saved again.
    state = found["state"] if start < found["step"] else None
    return {
        "curves": {tag: tail for tag, tail in tails.items() if tag not in MEASURED},
        "summary": found["summary"],
        "state": state,
        "validation": found["validation"],
    }


def without(state: dict[str, Any], fresh: dict[str, Any], item: tuple[str, ...]) -> dict[str, Any]:
    """A copy of `state` in which `item` is what a fresh run has there."""
    state = copy.deepcopy(state)
    if item == ("masters",):
        weights = state["trainer"]["weights"]
        weights |= {name: w.half().float() for name, w in weights.items() if w.is_floating_point()}
        return state
    place = state
    for key in item[:-1]:
        place, fresh = place[key], fresh[key]
    place[item[-1]] = fresh[item[-1]]
    return state


@pytest.mark.slow
def test_nothing_that_is_saved_could_be_left_out(tmp_path: Path, monkeypatch: Patch) -> None:
    """Each item of a checkpoint, replaced by what a fresh run starts with, changes the end.

    The items are found in the state itself, so one that is added later is tried too. An item that
    has its first value in every checkpoint (the name of a kind) tells nothing and is passed over.
    """
    options = [
        *EVERYTHING, "dtype=mixed", *BACKOFF, "loss_scaling.growth_interval=50",
        "trainer.accumulate=1", "loss_scaling.hysteresis=2", "trainer.max_steps=26",
    ]  # fmt: skip
    whole = tmp_path / "whole"
    train(whole, *options)
    own = composed("callbacks.progress_bar=null", *options)
    config = check_config(own)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", lambda *_: None)
        train(tmp_path / "fresh", *options)
    fresh = checkpoint.load(tmp_path / "fresh")
    saved = [checkpoint.read(path) for path in checkpoint.all_in(whole)]

    def ends_otherwise(snapshot: Snapshot, item: tuple[str, ...]) -> bool:
        state = without(snapshot.state, fresh, item)
        if not differing(state, snapshot.state):
            return False
        folder = tmp_path / f"{snapshot.global_step}-{'-'.join(item)}"
        (folder / "source").mkdir(parents=True)
        source = checkpoint.save(folder / "source", replace(snapshot, state=state))
        Run(replace(config, run=replace(config.run, resume=str(source))), own, folder).train()
        first, second = (ends(run, snapshot.global_step) for run in (folder, whole))
        return bool(differing(first, second))

    found = [*items(saved[0].state), ("masters",)]
    telling = [
        i
        for i in found
        # What metrics.csv holds of the last step decides what is written again, not how a run ends.
        # And this run is far from `max_consecutive_skips`.
        if i[:2] != ("callbacks", "csv")
        and i[-1] != "skipped_in_a_row"
        and any(differing(without(s.state, fresh, i), s.state) for s in saved)
    ]
    words = {word for item in telling for word in item}
    assert {"scaler", "schedule", "progress", "rng", "weights", "masters", "ema", "epoch"} <= words
    assert "extra_state" in words
    assert [item for item in telling if not any(ends_otherwise(s, item) for s in saved)] == []


def test_auto_names_each_bad_one_it_passes_over_and_sets_it_aside(
    whole: Path, tmp_path: Path, caplog: Log
) -> None:
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    (resumed / "checkpoints/step_00000016/state.pt").write_bytes(b"")
    (resumed / "checkpoints/step_00000012/manifest.json").unlink()
    train(resumed, *EVERY_FOURTH_STEP, "resume=auto")
    said = [line for line in caplog.messages if line.startswith("warning: resume=auto")]
    assert [line.split(": ")[1] for line in said] == [
        "resume=auto passes over step_00000016",
        "resume=auto passes over step_00000012",
    ]
    assert re.search(r"state\.pt: damaged, 0 bytes instead of \d+; use an older one", said[0])
    assert "no readable checkpoint (manifest.json: No such file or directory)" in said[1]
    assert_same_run(whole, resumed)
    assert (resumed / "checkpoints/step_00000016.set_aside").exists()


def test_auto_refuses_where_every_checkpoint_is_bad(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    for path in checkpoint.all_in(folder):
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of the 4 checkpoints in \S+ can be used"):
        train(folder, *EVERY_FOURTH_STEP, "resume=auto")


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


OPTIONS = {
    "trainer": {"epochs": 2, "log_every": 1, "eval_every": 3},
    "dataset": {"batch_size": 64, "workers": 0},
}


@pytest.mark.parametrize(
    ("schedule", "change", "said"),
    [
        ("some.Cosine", {"trainer.epochs": 3}, ["trainer.epochs=3 (was 2)"]),
        (None, {"trainer.epochs": 3}, []),  # Of a schedule only the length decides.
        ("some.Cosine", {"trainer.log_every": 5, "dataset.workers": 1}, []),
        ("a.ReduceLROnPlateau", {"trainer.eval_every": 5}, ["trainer.eval_every=5 (was 3)"]),
    ],
)
def test_an_option_forbids_exactness_where_it_changes_a_number(
    schedule: str | None, change: dict[str, int], said: list[str]
) -> None:
    then = OmegaConf.create(OPTIONS)
    then.scheduler = {"_target_": schedule} if schedule else None
    now = then.copy()
    for name, value in change.items():
        OmegaConf.update(now, name, value)
    old, new = (OmegaConf.to_container(options) for options in (then, now))
    assert compare(old, new) == (said, [])  # type: ignore[arg-type]


def test_the_same_options_and_machine_are_not_warned_of(
    whole: Path, tmp_path: Path, caplog: Log
) -> None:
    resumed = cut(whole, tmp_path / "resumed")
    watching = ["trainer.log_every=5", "dataset.workers=1", "numerics=on", "numerics.every=50"]
    train(resumed, *EVERY_FOURTH_STEP, *watching, "resume=auto")
    assert [line for line in caplog.messages if line.startswith("warning")] == []
