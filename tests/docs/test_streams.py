"""The page on streams: its commands run, and each package's stream is read as the page has it."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from fixtures import Patch
from in_process import command, scalars
from pages import Page

from mpframe.data.loaders import make_loader

PAGE = Page(ROOT / "docs" / "streams.md")


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(here: Path, monkeypatch: Patch) -> None:
    monkeypatch.syspath_prepend(here)
    for name, text in PAGE.files().items():
        Path(name).write_text(text)
    runpy.run_path("make_shards.py")
    first, second, tokens = PAGE.commands()
    assert [command(*words.arguments, "device=cpu") for words in (first, second)] == [0, 0]
    assert [step for step, _ in scalars(Path("runs/rows"))["loss/val"]] == [20, 40, 60]
    small = ("dataset.context=16", "model.width=8", "device=cpu", "hydra.run.dir=runs/tokens")
    assert command(*tokens.arguments, *small) == 0
    assert len(scalars(Path("runs/tokens"))["metric/bits_per_byte/val"]) == 2


def write_json(folder: Path) -> None:
    for shard in range(2):
        rows = [json.dumps({"x": 100 * shard + row}) for row in range(100)]
        (folder / f"{shard}.json").write_text("\n".join(rows))


def write_tar(folder: Path) -> None:
    for shard in range(2):
        with pytest.importorskip("webdataset").TarWriter(f"{folder}/shard-{shard}.tar") as tar:
            for row in range(20):
                tar.write({"__key__": f"{shard}-{row}", "x.json": row})


def write_mds(folder: Path) -> None:
    made = pytest.importorskip("streaming").MDSWriter(out=f"{folder}/mds", columns={"x": "int"})
    with made as writer:
        for row in range(40):
            writer.write({"x": row})


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("package", "write"), [
    ("datasets", write_json), ("webdataset", write_tar), ("streaming", write_mds),
    ("torchdata.stateful_dataloader", None),
])  # fmt: skip
def test_a_packages_stream_is_read(
    package: str, write: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    if write is not None:
        write(tmp_path / "data")
    (code,) = (code for code in PAGE.blocks("python") if f" {package} import" in code
               or f"import {package}\n" in code)  # fmt: skip
    names: dict[str, Any] = {}
    exec(code, names)
    loader = make_loader(names["train"], 4, shuffle=True, drop_last=True, batches_per_epoch=3)
    assert len(list(loader.epoch(0))) == 3
    loader.close()
