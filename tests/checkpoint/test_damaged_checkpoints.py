"""Bad checkpoints, all kinds: refused in one line that names the file, and nothing has changed."""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkout import ROOT
from hostile_checkpoints import CASES
from in_process import StartRun, train
from sameness import differing
from time_limit import time_limit

from mpframe import checkpoint
from mpframe.checkpoint.folder import Manifest, prune, sha256_of
from mpframe.core.errors import CheckpointError
from mpframe.run.resume import Renew, Resume
from mpframe.training.trainer import Trainer

OPTIONS = [
    "model=mlp", "model.hidden=32", "dtype=mixed", "trainer.epochs=1", "trainer.ema_decay=0.9",
    "trainer.max_steps=8", "trainer.checkpoint_every=4", "trainer.keep_last=9",
]  # fmt: skip

Damage = Callable[[Path], None]


def truncated(share: float) -> Damage:
    def damage(path: Path) -> None:
        content = (path / "state.pt").read_bytes()
        (path / "state.pt").write_bytes(content[: int(len(content) * share)])

    return damage


def flipped(which: str) -> Damage:
    """One bit in the first, the middle or the last tensor that the file holds."""

    def damage(path: Path) -> None:
        content = bytearray((path / "state.pt").read_bytes())
        weights = [w for w in checkpoint.load(path)["trainer"]["weights"].values() if w.numel() > 9]
        tensor = {"first": weights[0], "middle": weights[len(weights) // 2], "last": weights[-1]}
        at = content.index(tensor[which].numpy().tobytes())
        content[at + 5] ^= 16
        (path / "state.pt").write_bytes(content)

    return damage


def swapped(path: Path) -> None:
    other = path.with_name("step_00000004")
    for target, source in ((path, other), (other, path)):
        (source / "state.pt").rename(target / "state.swapped")
    for folder in (path, other):
        (folder / "state.swapped").rename(folder / "state.pt")


def foreign(path: Path) -> None:
    (path / "state.pt").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(2000))


def without_digest(path: Path) -> None:
    sealed = json.loads((path / "manifest.json").read_text())
    del sealed["content"]["files"]["state.pt"]["sha256"]
    (path / "manifest.json").write_text(json.dumps(sealed))


def newer(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"format": 2', '"format": 3'))


def lines_for_a_format(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"format": 2', '"format": "2\\n3"'))


def other_facts(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"value": 0.', '"value": 1.'))


def resealed(path: Path) -> None:
    """What somebody who means harm would do: a bad content with a manifest that fits."""
    torch.save({"nothing": "of ours"}, path / "state.pt")
    names = ("state.pt", "config.yaml")
    sizes = {name: (path / name).stat().st_size for name in names}
    digests = {name: sha256_of(path / name) for name in names}
    files = {name: {"bytes": sizes[name], "sha256": digests[name]} for name in names}
    (path / "manifest.json").write_text(Manifest(files, {}).text())


DAMAGE: dict[str, tuple[Damage, str]] = {
    "empty": (truncated(0), r"state\.pt: damaged, 0 bytes instead of \d+"),
    "truncated early": (truncated(0.1), r"state\.pt: damaged, \d+ bytes instead of \d+"),
    "truncated half": (truncated(0.5), r"state\.pt: damaged, \d+ bytes instead of \d+"),
    "truncated late": (truncated(0.999), r"state\.pt: damaged, \d+ bytes instead of \d+"),
    "bit in the first": (flipped("first"), r"state\.pt: damaged, its digest differs"),
    "bit in the middle": (flipped("middle"), r"state\.pt: damaged, its digest differs"),
    "bit in the last": (flipped("last"), r"state\.pt: damaged, its digest differs"),
    "foreign file": (foreign, r"state\.pt: damaged, \d+ bytes instead of \d+"),
    "missing state": (lambda p: (p / "state.pt").unlink(), r"state\.pt: cannot be read \(No such"),
    "missing config": (lambda p: (p / "config.yaml").unlink(), r"config\.yaml: cannot be read"),
    "other config": (
        lambda p: (p / "config.yaml").write_text("seed: 1"), r"config\.yaml: damaged, 7 bytes",
    ),
    "missing digest": (without_digest, r"manifest\.json: damaged, not a manifest"),
    "newer format": (newer, r"step_00000008: format 3, this version reads 2; use the version of"),
    "format of two lines": (lines_for_a_format, r"step_00000008: format 2\\n3, this version reads"),
    "manifest empty": (lambda p: (p / "manifest.json").write_text(""), r"manifest\.json: damaged"),
    "manifest a list": (lambda p: (p / "manifest.json").write_text("[]"), r"manifest\.json: dam"),
    "manifest altered": (other_facts, r"manifest\.json: damaged, its digest differs"),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), r"no readable checkpoint"),
    "another structure": (resealed, r"step_00000008: of something else \(KeyError"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder, *OPTIONS)
    return folder


def refused(start_run: StartRun, folder: Path, source: Path, *options: str) -> str:
    """The line that refuses `source`; neither the trainer nor any generator has changed by it."""
    before: list[object] = []

    def remember(trainer: Trainer) -> object:
        return {"trainer": trainer.state_dict(), "rng": checkpoint.rng_state()}

    def look(resume: Resume, trainer: Trainer, renew: Renew) -> object:
        torch.rand(()), random.random()  # The generators stand elsewhere than the checkpoint's.
        before.append(checkpoint.Snapshot(0, remember(trainer)).to_cpu().state)
        try:
            return into(resume, trainer, renew)
        finally:
            before.append(remember(trainer))

    into = Resume.into
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Resume, "into", look)
        with pytest.raises(CheckpointError) as caught:
            start_run(folder, *OPTIONS, *options, f"resume={source}")
    assert differing(*before) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", [*DAMAGE, "swapped"])
def test_a_damaged_checkpoint_is_refused_and_auto_takes_the_one_before(
    start_run: StartRun, whole: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "summary.json").unlink()
    newest = folder / "checkpoints/step_00000008"
    damage, said = DAMAGE.get(case, (swapped, r"state\.pt: damaged, \S+"))
    damage(newest)
    assert re.search(said, refused(start_run, tmp_path / "other", newest))
    if case == "swapped":
        return  # Then both are bad.
    caplog.clear()
    summary = start_run(folder, *OPTIONS, "resume=auto")
    assert summary.steps == 8
    (line,) = (line for line in caplog.messages if "passes over" in line)
    assert re.search(rf"^warning: resume=auto passes over step_00000008: .*{said}", line), line
    assert differing(checkpoint.load(folder), checkpoint.load(whole)) == []


def adopt(source: Path, folder: Path) -> None:
    """Put a checkpoint in the place of a folder's own, under the name of the folder's run."""
    place = folder / "checkpoints" / source.name
    run = Manifest.read(place).facts["run"]
    shutil.rmtree(place)
    shutil.copytree(source, place)
    manifest = Manifest.read(place)
    (place / "manifest.json").write_text(
        replace(manifest, facts={**manifest.facts, "run": run}).text()
    )


def sealed(config: str = "", **facts: object) -> Damage:
    """A manifest in order around options or facts that are not."""

    def damage(path: Path) -> None:
        if config:
            (path / "config.yaml").write_text(config)
        names = ("state.pt", "config.yaml")
        sizes = {name: (path / name).stat().st_size for name in names}
        files = {name: {"bytes": sizes[name], "sha256": sha256_of(path / name)} for name in names}
        kept = Manifest.read(path).facts
        (path / "manifest.json").write_text(Manifest(files, {**kept, **facts}).text())

    return damage


def progress(**counts: object) -> Damage:
    def damage(path: Path) -> None:
        state = checkpoint.load(path)
        state["trainer"]["progress"] |= counts
        torch.save(state, path / "state.pt")
        sealed()(path)

    return damage


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
CRAFTED: dict[str, tuple[Damage, str]] = {
    **CASES,
    "an alias bomb": (
        sealed(BOMB),
        r"config\.yaml: refused, a stored configuration has no aliases",
    ),
    "options of a list": (sealed("[1, 2]"), r"config\.yaml: not a stored configuration"),
    "options not YAML": (sealed("a: ]["), r"config\.yaml: not a stored configuration"),
    "options too deep": (sealed("a: " + "[" * 999 + "]" * 999), r"config\.yaml: refused, a stored"),
    "steps below 0": (progress(steps=-5), r"its progress\.steps is no count but -5; use another"),
    "steps of 1e30": (progress(steps=1e30), r"its progress\.steps is no count but 1e\+30; use"),
    "steps of text": (progress(batch="0"), r"its progress\.batch is no count but '0'; use another"),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """That of a run with the options of the checkpoints."""
    kept: list[Trainer] = []
    into = Resume.into

    def keep(resume: Resume, trainer: Trainer, renew: Renew) -> object:
        kept.append(trainer)
        return into(resume, trainer, renew)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Resume, "into", keep)
        train(tmp_path_factory.mktemp("other"), *OPTIONS)
    return kept[0]


@pytest.mark.parametrize("case", CRAFTED)
def test_auto_passes_over_a_crafted_checkpoint_to_the_one_before(
    trainer: Trainer, whole: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, said = CRAFTED[case]
    folder = shutil.copytree(whole, tmp_path / "run")
    config = (folder / "config_resolved.yaml").read_text()
    damage(folder / "checkpoints/step_00000008")
    with time_limit(30):
        Resume("auto", folder, config).into(trainer)
    assert trainer.progress.global_step == 4
    (line,) = (line for line in caplog.messages if "passes over" in line)
    assert re.search(rf"^warning: resume=auto passes over step_00000008: .*{said}", line), line
    assert "\n" not in line


@pytest.mark.parametrize(
    "facts", [{"validation": -5}, {"validation": {"value": "x"}}, {"made_on": [1]}, {"run": 7}]
)
def test_facts_that_are_none_change_nothing(
    trainer: Trainer, whole: Path, tmp_path: Path, facts: dict[str, object]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    sealed(**facts)(folder / "checkpoints/step_00000008")
    Resume("auto", folder, (folder / "config_resolved.yaml").read_text()).into(trainer)
    assert trainer.progress.global_step == 8
    prune(folder, 1, 1)
    assert folder / "checkpoints/step_00000008" in checkpoint.all_in(folder)


@pytest.mark.parametrize(
    "state", [7, [], {}, {"last_step": []}, {"last_step": {"step": 8, "events": ["////"]}}]
)
def test_a_callbacks_state_that_is_none_is_one_line(
    start_run: StartRun,
    whole: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    state: object,
) -> None:
    caplog.set_level("INFO")
    folder = shutil.copytree(whole, tmp_path / "run")
    newest = folder / "checkpoints/step_00000008"
    held = checkpoint.load(newest)
    assert "curves" in held["callbacks"]
    held["callbacks"]["curves"] = state
    torch.save(held, newest / "state.pt")
    sealed()(newest)
    said = r"step_00000008: its state of callbacks\.curves does not fit \(.*\); resume from another"
    assert re.search(said, refused(start_run, folder, newest))
    assert start_run(folder, *OPTIONS, "resume=auto").steps == 8
    assert re.search(rf"resume=auto passes over step_00000008: .*{said}", caplog.text)
    assert "resumed from" in caplog.text
    assert "at step 4" in caplog.text


def test_the_page_tells_the_size_of_the_table() -> None:
    page = " ".join((ROOT / "docs" / "checkpoints.md").read_text().split())
    damaged = len(DAMAGE) + 1 + len(CRAFTED)
    assert f"{damaged} kinds of damaged checkpoints and {len(OTHERS)} of something else" in page


OTHERS = {
    "architecture": (["model.hidden=33"], r"weights: '\S+' has shape .* in the checkpoint"),
    "depth": (["model.depth=3"], r"weights: '\S+' is missing from the checkpoint"),
    "optimizer": (["optimizer=sgd"], r"made with optimizer\._target_=\S+AdamW, and this run has"),
    "schedule": (["scheduler=onecycle"], r"made with scheduler\._target_=\S+, and this run has"),
    "no schedule": (
        ["scheduler=none"],
        r"made with scheduler\._target_=\S+, and this run has \S+constant",
    ),
    "scaler": (["loss_scaling=LogMax"], r"loss_scaling"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_of_something_else_is_refused_and_auto_passes_it_over(
    start_run: StartRun, whole: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, said = OTHERS[case]
    newest = whole / "checkpoints/step_00000008"
    line = refused(start_run, tmp_path / "other", newest, *options)
    assert re.search(rf"^{re.escape(str(newest))}: .*{said}", line), line
    own = tmp_path / "own"
    start_run(own, *OPTIONS, *options)
    adopt(newest, own)
    caplog.clear()
    assert start_run(own, *OPTIONS, *options, "resume=auto").steps == 8
    (line,) = (line for line in caplog.messages if "passes over" in line)
    assert re.search(said, line), line


def test_a_file_is_no_checkpoint(start_run: StartRun, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    photo.write_bytes(b"\x89PNG")
    said = refused(start_run, tmp_path / "run", photo)
    assert re.search(
        r"photo\.png: no readable checkpoint \(manifest\.json: Not a directory\)", said
    )
