"""Resume: bit for bit the undisturbed run, whatever was on, and nothing that is saved is idle."""

import copy
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import StartRun
from sameness import MEASURED, assert_same_run, cut, differing, results

from mpframe import checkpoint
from mpframe.checkpoint import Snapshot
from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.core.errors import CheckpointError
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


@pytest.mark.parametrize("scaling", ["none", "static", "Backoff", "LogMax"])
@pytest.mark.parametrize("dtype", ["fp32", "mixed", "amp"])
def test_a_resumed_run_equals_the_undisturbed_one(
    start_run: StartRun, tmp_path: Path, dtype: str, scaling: str
) -> None:
    options = [*EVERYTHING, f"dtype={dtype}", f"loss_scaling={scaling}"]
    if scaling == "Backoff":  # Skips, grows and backs off before and after the cut.
        options += ["loss_scaling.init_scale=1e30", "loss_scaling.max_scale=1e30"]
        options += ["loss_scaling.growth_interval=2", "loss_scaling.backoff_factor=1e-8"]
    start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)


def test_with_products_below_16_bits(start_run: StartRun, tmp_path: Path) -> None:
    """Delayed scales forward, stochastic rounding of the gradients."""
    gradient = "{dy:{format:e2m1,rounding:stochastic}}"
    recipe = f"{{every:{{format:e4m3fn,history:3}},dx:{gradient},dw:{gradient}}}"
    options = [*EVERYTHING, "dtype=mixed_bf16", "dtype.products=both"]
    options += [f"+dtype.recipes.both={recipe}"]
    start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    start_run(resumed, *options, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)
    products = checkpoint.load(resumed)["trainer"]["products"]
    assert products["generators"]
    assert any(name.endswith(" dy") for name in products["amax"])


@pytest.mark.parametrize("async_save", [True, False])
def test_with_workers_and_saved_in_the_background(
    start_run: StartRun, tmp_path: Path, async_save: bool
) -> None:
    options = [*EVERYTHING, f"trainer.async_save={async_save}"]
    start_run(tmp_path / "whole", *options)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    start_run(resumed, *options, "dataset.workers=2", "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)


@pytest.mark.parametrize("at", [4, 8, 12, 16])
def test_a_run_may_be_cut_anywhere(start_run: StartRun, tmp_path: Path, at: int) -> None:
    """In the first epoch, in the second, at a validation's step, and after the last step."""
    start_run(tmp_path / "whole", *EVERYTHING)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed", at)
    start_run(resumed, *EVERYTHING, "resume=auto")
    assert_same_run(tmp_path / "whole", resumed)


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


def test_nothing_that_is_saved_could_be_left_out(
    start_run: StartRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each item of a checkpoint, replaced by what a fresh run starts with, changes the end.

    The items are found in the state itself, so one that is added later is tried too. An item that
    has its first value in every checkpoint (the name of a kind) tells nothing and is passed over.
    """
    options = [
        *EVERYTHING, "dtype=mixed", "loss_scaling=Backoff", "loss_scaling.init_scale=1e30",
        "loss_scaling.max_scale=1e30", "loss_scaling.growth_interval=50", "trainer.accumulate=1",
        "loss_scaling.hysteresis=2", "loss_scaling.backoff_factor=1e-8", "trainer.max_steps=26",
    ]  # fmt: skip
    whole = tmp_path / "whole"
    start_run(whole, *options)
    own = without_hydra(compose_named(["callbacks.progress_bar=null", *options])[1])
    config = check_config(own)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", lambda *_: None)
        start_run(tmp_path / "fresh", *options)
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


EVERY_FOURTH_STEP = [*EVERYTHING, "trainer.keep_best=0"]  # And no best ones between them.


def test_auto_names_each_bad_one_it_passes_over_and_sets_it_aside(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(tmp_path / "whole", *EVERY_FOURTH_STEP)
    resumed = shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    (resumed / "checkpoints/step_00000016/state.pt").write_bytes(b"")
    (resumed / "checkpoints/step_00000012/manifest.json").unlink()
    start_run(resumed, *EVERY_FOURTH_STEP, "resume=auto")
    said = [line for line in caplog.messages if line.startswith("warning: resume=auto")]
    assert [line.split(": ")[1] for line in said] == [
        "resume=auto passes over step_00000016",
        "resume=auto passes over step_00000012",
    ]
    assert re.search(r"state\.pt: damaged, 0 bytes instead of \d+; use an older one", said[0])
    assert "no readable checkpoint (manifest.json: No such file or directory)" in said[1]
    assert_same_run(tmp_path / "whole", resumed)
    assert (resumed / "checkpoints/step_00000016.set_aside").exists()


def test_auto_refuses_where_every_checkpoint_is_bad(start_run: StartRun, tmp_path: Path) -> None:
    start_run(tmp_path, *EVERY_FOURTH_STEP)
    for path in checkpoint.all_in(tmp_path):
        (path / "state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"none of the 4 checkpoints in \S+ can be used"):
        start_run(tmp_path, *EVERY_FOURTH_STEP, "resume=auto")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["dataset.batch_size=32"], r"dataset\.batch_size=32 \(was 64\)"),
        (["trainer.accumulate=1"], r"trainer\.accumulate=1 \(was 2\)"),
        (["dtype=amp"], r"dtype\.mode=amp \(was mixed\)"),
        (["trainer.epochs=3"], r"trainer\.epochs=3 \(was 2\)"),
        (
            ["seed=1", "trainer.clip_norm=2"],
            r"seed=1 \(was 0\), trainer\.clip_norm=2\.0 \(was 1\.0\)",
        ),
    ],
)
def test_what_forbids_exactness_is_named_in_one_line(
    start_run: StartRun,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: list[str],
    said: str,
) -> None:
    start_run(tmp_path, *EVERYTHING, "trainer.max_steps=4")
    caplog.clear()
    start_run(tmp_path, *EVERYTHING, *change, "trainer.max_steps=5", "resume=auto")
    (line,) = (line for line in caplog.messages if "bit for bit" in line)
    assert re.search(f"undisturbed one bit for bit: .*{said}", line), line


def test_another_torch_device_or_thread_count_is_named(
    start_run: StartRun,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_run(tmp_path, *EVERYTHING, "trainer.max_steps=4")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "__version__", "2.99")
    caplog.clear()
    start_run(tmp_path, *EVERYTHING, "trainer.max_steps=4", "resume=auto")
    (line,) = (line for line in caplog.messages if "bit for bit" in line)
    assert re.search(r"torch=2\.99 \(was \S+\), threads=7 \(was \d+\)$", line), line


def test_the_same_options_and_machine_are_not_warned_of(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(tmp_path / "whole", *EVERYTHING)
    resumed = cut(tmp_path / "whole", tmp_path / "resumed")
    caplog.clear()
    watching = ["trainer.log_every=5", "dataset.workers=1", "numerics=on"]
    start_run(resumed, *EVERYTHING, *watching, "resume=auto")
    assert [line for line in caplog.messages if line.startswith("warning")] == []


def test_options_the_checkpoint_holds_are_said_not_to_count(
    start_run: StartRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(tmp_path, *EVERYTHING, "trainer.max_steps=4")
    start_run(tmp_path, *EVERYTHING, "trainer.max_steps=4", "optimizer.lr=0.5", "resume=auto")
    assert (
        "warning: not used, because the checkpoint holds its own: optimizer.lr=0.5 (goes on with "
        "0.01);"
        " start a new run with init_from to change it"
    ) in caplog.messages
