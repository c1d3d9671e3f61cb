"""Bad checkpoints, all kinds: refused in one line that names the file, and nothing has changed."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, refused, time_limit
from hostile_checkpoints import CASES, seal
from in_process import differing, train, trained

from mpframe import checkpoint
from mpframe.checkpoint.folder import Manifest
from mpframe.core.errors import CheckpointError
from mpframe.run.resume import resume_from
from mpframe.training.trainer import Trainer

OPTIONS = [
    "model=mlp", "model.hidden=32", "dtype=mixed", "trainer.epochs=1", "trainer.ema_decay=0.9",
    "trainer.max_steps=8", "trainer.checkpoint_every=4", "trainer.keep_last=9",
]  # fmt: skip
NEWEST = "checkpoints/step_00000008"
Damage = Callable[[Path], None]
whole = trained(*OPTIONS)
OTHERS = {
    "architecture": (["model.hidden=33"], r"weights: '\S+' has shape .* in the checkpoint"),
    "depth": (["model.depth=3"], r"weights: '\S+' is missing from the checkpoint"),
    "optimizer": (["optimizer=sgd"], r"made with optimizer\._target_=\S+AdamW, and this run has"),
    "no schedule": (["scheduler=none"], r"made with scheduler\._target_=\S+, and this run has \S+"),
    "scaler": (["loss_scaling=LogMax"], "loss_scaling"),
}


@pytest.fixture(autouse=True)
def _nothing_is_run(here: Path) -> Iterator[None]:
    yield
    assert not Path("attacked").exists()


def state(change: Callable[[bytes], bytes]) -> Damage:
    """A state file of other bytes."""
    return lambda path: (path / "state.pt").write_bytes(change((path / "state.pt").read_bytes()))


def flipped(path: Path) -> None:
    """One bit in the first tensor that the file holds."""
    first = next(w for w in checkpoint.load(path)["trainer"]["weights"].values() if w.numel() > 9)
    old = first.numpy().tobytes()
    state(lambda content: content.replace(old, bytes([old[0] ^ 16]) + old[1:], 1))(path)


def edit(old: str, new: str, path: Path) -> None:
    text, changes = re.subn(old, new, (path / "manifest.json").read_text())
    assert changes
    (path / "manifest.json").write_text(text)


def reseal(path: Path, config: str = "", **facts: object) -> None:
    """A manifest in order around options or facts that are not."""
    kept = Manifest.read(path).facts
    if config:
        (path / "config.yaml").write_text(config)
    seal(path, {**kept, **facts})


def change(part: str, key: str, path: Path, **to: object) -> None:
    """A state in order but for one thing."""
    held = checkpoint.load(path)
    held[part][key] = {**held[part][key], **to} if part == "trainer" else to[key]
    torch.save(held, path / "state.pt")
    reseal(path)


DEEP = "a: " + "[" * 999 + "]" * 999
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
ODD = {"last_step": {"step": 8, "events": ["////"]}}
NO_FIT = r"step_00000008: its state of callbacks\.curves does not fit \(.*\); resume from another"
BAD: dict[str, tuple[Damage, str]] = {
    **CASES,
    "truncated": (state(lambda old: old[:-9]), r"state\.pt: damaged, its digest differs"),
    "bit in the first": (flipped, r"state\.pt: damaged, its digest differs"),
    "missing state": (lambda path: (path / "state.pt").unlink(), r"state\.pt: cannot be read \(No"),
    "manifest missing": (lambda path: (path / "manifest.json").unlink(), "no readable checkpoint"),
    "missing digest": (partial(edit, '  "sha256"', '  "sha"'), r"manifest\.json: damaged, not a m"),
    "newer format": (partial(edit, '"format": 2', '"format": 3'), "format 3, this version reads 2"),
    "format of two_lines": (partial(edit, '"format": 2', r'"format": "2\\n3"'), r"format '2\\n3',"),
    "manifest altered": (partial(edit, '"value": 0.', '"value": 1.'), r"manifest\.json: .*digest"),
    "an alias bomb": (partial(reseal, config=BOMB), r"config\.yaml: refused, a stored .* no alia"),
    "options too deep": (partial(reseal, config=DEEP), r"config\.yaml: refused, a stored"),
    "steps below 0": (partial(change, "trainer", "progress", steps=-5), r"progress\.steps is no c"),
    "callbacks_state a number": (partial(change, "callbacks", "curves", curves=7), NO_FIT),
    "callbacks_state undecodable": (partial(change, "callbacks", "curves", curves=ODD), NO_FIT),
}  # fmt: skip


def built(folder: Path, *options: str) -> tuple[Trainer, str]:
    """The trainer of a run before its first step, with its callbacks, and the run's options."""
    kept: list[Trainer] = []
    load = resume_from
    with pytest.MonkeyPatch.context() as patched:
        noting = lambda *words: kept.append(words[0]) or load(*words)  # noqa: E731
        patched.setattr("mpframe.run.run.resume_from", noting)
        patched.setattr(Trainer, "fit", lambda *_: None)
        train(folder, *OPTIONS, *options)
    return kept[0], (folder / "config_resolved.yaml").read_text()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, str]:
    return built(tmp_path_factory.mktemp("own"))


def refusal_of(trainer: Trainer, config: str, source: Path) -> str:
    """The line that refuses `source`; neither the trainer nor any generator has changed by it."""

    def present() -> dict[str, object]:
        return {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()}

    torch.rand(()), random.random()  # The generators stand elsewhere than the checkpoint's.
    before = checkpoint.Snapshot(0, present()).to_cpu().state
    with time_limit(30):
        line = refused(
            CheckpointError, resume_from, trainer, str(source), Path("elsewhere"), config
        )
    assert differing(before, present()) == []
    return line


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused(own: Any, folder: Path, case: str, caplog: Log) -> None:
    """And resume=auto takes the one before."""
    caplog.set_level("INFO")
    damage, said = BAD[case]
    damage(folder / NEWEST)
    line = refusal_of(*own, folder / NEWEST)
    assert re.search(said, line), line
    assert line.startswith(str(folder))
    with time_limit(30):
        resume_from(own[0], "auto", folder, own[1])
    (line,) = (line for line in caplog.messages if "passes over" in line)
    assert re.search(rf"^warning: resume=auto passes over step_00000008: .*({said})", line), line
    assert "\n" not in line
    assert caplog.messages[-1].endswith("step_00000004 at step 4")


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_something_else_is_refused(whole: Path, tmp_path: Path, case: str) -> None:
    options, said = OTHERS[case]
    line = refusal_of(*built(tmp_path / "other", *options), whole / NEWEST)
    assert re.search(rf"^{re.escape(str(whole / NEWEST))}: .*{said}", line), line
