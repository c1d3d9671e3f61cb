"""Bad checkpoints, all kinds: refused in one line that names the file, and nothing has changed."""

import io
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from fixtures import Log, Patch, Shown
from hostile_checkpoints import ATTACKS, CASES, STATES, seal
from in_process import train
from sameness import differing
from time_limit import time_limit

from mpframe import checkpoint
from mpframe.checkpoint.folder import Manifest, prune
from mpframe.cli.commands.evaluate import evaluate
from mpframe.cli.commands.export import main as export
from mpframe.core.errors import CheckpointError
from mpframe.run.resume import Renew, Resume
from mpframe.training.trainer import Trainer

OPTIONS = [
    "model=mlp", "model.hidden=32", "dtype=mixed", "trainer.epochs=1", "trainer.ema_decay=0.9",
    "trainer.max_steps=8", "trainer.checkpoint_every=4", "trainer.keep_last=9",
]  # fmt: skip
NEWEST = "checkpoints/step_00000008"
Damage = Callable[[Path], None]


@pytest.fixture(autouse=True)
def _nothing_is_run(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("attacked").exists()


def truncated(path: Path) -> None:
    content = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(content[:-9])


def flipped(path: Path) -> None:
    """One bit in the first tensor that the file holds."""
    content = bytearray((path / "state.pt").read_bytes())
    first = next(w for w in checkpoint.load(path)["trainer"]["weights"].values() if w.numel() > 9)
    content[content.index(first.numpy().tobytes()) + 5] ^= 16
    (path / "state.pt").write_bytes(content)


def without(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def without_digest(path: Path) -> None:
    sealed = json.loads((path / "manifest.json").read_text())
    del sealed["content"]["files"]["state.pt"]["sha256"]
    (path / "manifest.json").write_text(json.dumps(sealed))


def edited(old: str, new: str) -> Damage:
    def damage(path: Path) -> None:
        text = (path / "manifest.json").read_text()
        assert old in text
        (path / "manifest.json").write_text(text.replace(old, new))

    return damage


def sealed(config: str = "", **facts: object) -> Damage:
    """A manifest in order around options or facts that are not."""

    def damage(path: Path) -> None:
        kept = Manifest.read(path).facts
        if config:
            (path / "config.yaml").write_text(config)
        seal(path, {**kept, **facts})

    return damage


def changed(change: Callable[[dict[str, Any]], None]) -> Damage:
    """A state in order but for one thing."""

    def damage(path: Path) -> None:
        state = checkpoint.load(path)
        change(state)
        torch.save(state, path / "state.pt")
        sealed()(path)

    return damage


def progress(**counts: object) -> Damage:
    return changed(lambda state: state["trainer"]["progress"].update(counts))


def curves(state: object) -> Damage:
    return changed(lambda held: held["callbacks"].update(curves=state))


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
NO_FIT = r"step_00000008: its state of callbacks\.curves does not fit \(.*\); resume from another"
BAD: dict[str, tuple[Damage, str]] = {
    **CASES,
    "truncated": (truncated, r"state\.pt: damaged, \d+ bytes instead of \d+"),
    "bit in the first": (flipped, r"state\.pt: damaged, its digest differs"),
    "missing state": (without("state.pt"), r"state\.pt: cannot be read \(No such"),
    "manifest missing": (without("manifest.json"), "no readable checkpoint"),
    "missing digest": (without_digest, r"manifest\.json: damaged, not a manifest"),
    "newer format": (
        edited('"format": 2', '"format": 3'),
        r"step_00000008: format 3, this version reads 2; use the version of",
    ),
    "format of two_lines": (
        edited('"format": 2', '"format": "2\\n3"'),
        r"step_00000008: format 2\\n3, this version reads",
    ),
    "manifest altered": (
        edited('"value": 0.', '"value": 1.'),
        r"manifest\.json: damaged, its digest differs",
    ),
    "an alias bomb": (sealed(BOMB), r"config\.yaml: refused, a stored configuration has no alia"),
    "options too deep": (sealed("a: " + "[" * 999 + "]" * 999), r"config\.yaml: refused, a stored"),
    "steps below 0": (progress(steps=-5), r"its progress\.steps is no count but -5; use another"),
    "callbacks_state a number": (curves(7), NO_FIT),
    "callbacks_state undecodable": (curves({"last_step": {"step": 8, "events": ["////"]}}), NO_FIT),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, *OPTIONS)
    return folder


def built(folder: Path, *options: str) -> tuple[Trainer, str]:
    """The trainer of a run before its first step, with its callbacks, and the run's options."""
    kept: list[Trainer] = []
    into = Resume.into

    def keep(resume: Resume, trainer: Trainer, renew: Renew) -> object:
        kept.append(trainer)
        return into(resume, trainer, renew)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Resume, "into", keep)
        patched.setattr(Trainer, "fit", lambda *_: None)
        train(folder, *OPTIONS, *options)
    return kept[0], (folder / "config_resolved.yaml").read_text()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, str]:
    return built(tmp_path_factory.mktemp("own"))


def refused(trainer: Trainer, config: str, source: Path) -> str:
    """The line that refuses `source`; neither the trainer nor any generator has changed by it."""

    def present() -> dict[str, object]:
        return {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()}

    torch.rand(()), random.random()  # The generators stand elsewhere than the checkpoint's.
    before = checkpoint.Snapshot(0, present()).to_cpu().state
    with time_limit(30), pytest.raises(CheckpointError) as caught:
        Resume(str(source), Path("elsewhere"), config).into(trainer)
    assert differing(before, present()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused_and_auto_takes_the_one_before(
    own: tuple[Trainer, str], whole: Path, tmp_path: Path, case: str, caplog: Log
) -> None:
    caplog.set_level("INFO")
    folder = shutil.copytree(whole, tmp_path / "run")
    damage, said = BAD[case]
    damage(folder / NEWEST)
    line = refused(*own, folder / NEWEST)
    assert re.search(said, line), line
    assert line.startswith(str(folder))
    with time_limit(30):
        Resume("auto", folder, own[1]).into(own[0])
    (line,) = (line for line in caplog.messages if "passes over" in line)
    assert re.search(rf"^warning: resume=auto passes over step_00000008: .*({said})", line), line
    assert "\n" not in line
    assert caplog.messages[-1].endswith("step_00000004 at step 4")


def test_the_page_tells_the_size_of_the_table() -> None:
    page = " ".join((ROOT / "docs" / "checkpoints.md").read_text().split())
    assert f"{len(BAD)} kinds of damaged checkpoints and {len(OTHERS)} of something else" in page
    page = " ".join((ROOT / "docs" / "security.md").read_text().split())
    assert f"{len(STATES)} hostile state files are refused" in page


@pytest.mark.parametrize("facts", [{"validation": {"value": "x"}}, {"made_on": [1], "run": 7}])
def test_facts_that_are_none_change_nothing(
    own: tuple[Trainer, str], whole: Path, tmp_path: Path, facts: dict[str, object]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    sealed(**facts)(folder / NEWEST)
    Resume("auto", folder, own[1]).into(own[0])
    assert own[0].progress.global_step == 8
    prune(folder, 1, 1)
    assert folder / NEWEST in checkpoint.all_in(folder)


OTHERS = {
    "architecture": (["model.hidden=33"], r"weights: '\S+' has shape .* in the checkpoint"),
    "depth": (["model.depth=3"], r"weights: '\S+' is missing from the checkpoint"),
    "optimizer": (["optimizer=sgd"], r"made with optimizer\._target_=\S+AdamW, and this run has"),
    "no schedule": (
        ["scheduler=none"],
        r"made with scheduler\._target_=\S+, and this run has \S+constant",
    ),
    "scaler": (["loss_scaling=LogMax"], "loss_scaling"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_something_else_is_refused(whole: Path, tmp_path: Path, case: str) -> None:
    options, said = OTHERS[case]
    line = refused(*built(tmp_path / "other", *options), whole / NEWEST)
    assert re.search(rf"^{re.escape(str(whole / NEWEST))}: .*{said}", line), line


def test_a_file_is_no_checkpoint(own: tuple[Trainer, str], tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(b"\x89PNG")
    said = r"photo\.png: no readable checkpoint \(manifest\.json: Not a directory\)"
    assert re.search(said, refused(*own, photo))


# Read by other commands


READERS: dict[str, Callable[[Path], Any]] = {
    "evaluate": lambda run: evaluate(run, []),
    "init_from": lambda run: train(run.parent / "next", *OPTIONS, f"init_from={run}"),
    "export": lambda run: export([f"checkpoint={run}", "out=x.safetensors"]),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_code(reader: str, whole: Path, tmp_path: Path, capsys: Shown) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    STATES["code"][0](folder / NEWEST)
    with pytest.raises((CheckpointError, SystemExit)) as caught:
        READERS[reader](folder)
    line = str(caught.value) if reader != "export" else capsys.readouterr().err.rstrip()
    assert re.search(STATES["code"][1], line)
    assert "\n" not in line
    assert not Path("x.safetensors").exists()


def test_the_attacks_would_work_on_a_reader_that_unpickles() -> None:
    """The control: what is refused above does leave its file elsewhere."""
    torch.load(io.BytesIO(ATTACKS["code"]), weights_only=False)
    assert Path("attacked").exists()
    Path("attacked").unlink()
    pickle.loads(ATTACKS["a bare pickle"])
    assert Path("attacked").exists()
    Path("attacked").unlink()
