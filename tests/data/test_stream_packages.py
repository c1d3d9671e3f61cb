"""Streams of other packages as docs/streams.md makes them: each resumes exactly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from fixtures import Patch
from pages import Page
from test_streaming import Numbers, assert_resumes, loader, read
from torch import Tensor

from mpframe.core.comm import Comm

pytestmark = pytest.mark.filterwarnings("default")
WORKERS = pytest.mark.parametrize("workers", [0, 2])
CODE = Page(ROOT / "docs" / "streams.md").blocks("python")


def column(name: Any) -> Callable[[list[Any]], Tensor]:
    """Make a batch as the tests read it, [N, 2], of samples that are dicts or tuples."""
    return lambda samples: torch.tensor([[float(sample[name]), 0.0] for sample in samples])


@pytest.fixture
def data(here: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(here))
    (here / "data").mkdir()
    return here / "data"


def shown(package: str) -> dict[str, Any]:
    """What the page's block of this package makes."""
    (code,) = (own for own in CODE if own.split()[1].startswith(package))
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@WORKERS
@pytest.mark.parametrize("shuffled", [False, True])
def test_hugging_face_datasets(data: Path, workers: int, shuffled: bool) -> None:
    """In streaming. Its state does not have a shuffle buffer, which is filled again by reading."""
    pytest.importorskip("datasets")
    for shard in range(3):
        rows = [json.dumps({"x": 10 * shard + row}) for row in range(10)]
        (data / f"{shard}.json").write_text("\n".join(rows))

    def make(shuffled: bool = shuffled, **options: Any) -> Any:
        names = shown("datasets")
        plain = names["load_dataset"](
            "json", data_files="data/*.json", split="train", streaming=True
        )
        stream = names["train"] if shuffled else plain
        return loader(stream, workers=workers, collate=column("x"), **options)

    whole = assert_resumes(make, [1, 4, 9])
    order = torch.cat([whole[0], whole[2]])[:, 0].tolist()  # the first worker's, if there are two
    assert (order == sorted(order)) != shuffled
    seen: list[float] = []
    for rank in range(2):
        comm = Comm()
        comm.rank, comm.size = rank, 2
        own = make(False, comm=comm, endless=False)
        seen += [float(row[0]) for batch in own.epoch(0) for row in batch]
        own.close()
    assert sorted(seen) == list(range(30))


@WORKERS
def test_webdataset(data: Path, workers: int) -> None:
    """It splits itself, and is read again with the same seeds."""
    wds = pytest.importorskip("webdataset")
    for shard in range(2):
        with wds.TarWriter(str(data / f"shard-{shard}.tar")) as tar:
            for row in range(14):
                tar.write({"__key__": f"{shard}-{row:02}", "x.json": 14 * shard + row})

    def make() -> Any:
        return loader(shown("webdataset")["train"], collate=column(0), workers=workers)

    whole = assert_resumes(make, [1, 6, 9])
    assert len(set(torch.cat(whole[:6])[:, 0].tolist())) == 24


@WORKERS
@pytest.mark.parametrize("shuffle", [None, True])
def test_stateful_data_loader(workers: int, shuffle: bool | None) -> None:
    """torchdata's, with the workers it has."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> Any:
        torch.manual_seed(0)
        rows = Numbers() if shuffle is None else [*Numbers()]
        return loader(stateful(rows, 4, shuffle=shuffle, num_workers=workers, drop_last=True))

    assert_resumes(make, [1, 5, 7])
    assert len(read(loader(shown("torchdata")["train"]), 0, 3)) == 3


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_mosaic_streaming_dataset(data: Path, workers: int) -> None:
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(data / "mds"), columns={"x": "int"}) as writer:
        for number in range(40):
            writer.write({"x": number})

    def make() -> Any:
        streaming.base.util.clean_stale_shared_memory()
        return loader(shown("streaming")["train"], workers=workers, collate=column("x"))

    assert_resumes(make, [3, 7])
