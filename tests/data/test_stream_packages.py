"""Streams of other packages as they are, from local files: each resumes exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_streaming import Numbers, assert_resumes, loader, read
from torch import Tensor

from mpframe.core.comm import Comm
from mpframe.core.errors import DataError


def column(name: Any) -> Any:
    """Make a batch as the tests read it, [N, 2], of samples that are dicts or tuples."""

    def collate(samples: list[Any]) -> Tensor:
        return torch.tensor([[float(sample[name]), 0.0] for sample in samples])

    return collate


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_hugging_face_datasets(offline: None, tmp_path: Path, workers: int, shuffled: bool) -> None:
    """In streaming. Its state does not have a shuffle buffer, which is filled again by reading."""
    datasets = pytest.importorskip("datasets")
    for shard in range(3):
        rows = "".join(f'{{"x": {10 * shard + row}}}\n' for row in range(10))
        (tmp_path / f"{shard}.json").write_text(rows)
    files = str(tmp_path / "*.json")

    def make() -> Any:
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        stream = stream.shuffle(seed=1, buffer_size=8) if shuffled else stream
        return loader(stream, workers=workers, collate=column("x"))

    whole = assert_resumes(make, [1, 4, 9])
    assert (float(whole[0][0, 0]), shuffled) != (0.0, True)
    seen: list[float] = []
    for rank in range(2):
        comm = Comm()
        comm.rank, comm.size = rank, 2
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        own = loader(stream, workers=workers, collate=column("x"), comm=comm, endless=False)
        seen += [float(row[0]) for batch in own.epoch(0) for row in batch]
        own.close()
    assert sorted(seen) == list(range(30))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset(tmp_path: Path, workers: int) -> None:
    """It splits itself, and is read again with the same seeds. Without seeds it is refused."""
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        with wds.TarWriter(str(tmp_path / f"{shard}.tar")) as tar:
            for row in range(7):
                number = 7 * shard + row
                tar.write({"__key__": f"{number:03}", "n.cls": str(number)})

    def make(**seed: int) -> Any:
        shards = [str(tmp_path / f"{shard}.tar") for shard in range(4)]
        stream = wds.WebDataset(shards, shardshuffle=4, detshuffle=True, seed=1)
        stream = stream.shuffle(5, **seed).decode().to_tuple("n.cls")
        return loader(stream, workers=workers, collate=column(0))

    whole = assert_resumes(lambda: make(seed=1), [1, 6, 9])
    seen = torch.cat(whole[:6])[:, 0].tolist()
    assert len(set(seen)) == 24
    read(first := make(), 0, 3)
    again = make()
    again.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="WebDataset does not give the batch again"):
        read(again, 3, 4)
    first.close()
    again.close()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [None, True])
def test_stateful_data_loader(workers: int, shuffle: bool | None) -> None:
    """torchdata's, with the workers it has."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make() -> Any:
        torch.manual_seed(0)
        rows = Numbers() if shuffle is None else [*Numbers()]
        return loader(stateful(rows, 4, shuffle=shuffle, num_workers=workers, drop_last=True))

    assert_resumes(make, [1, 5, 7])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_mosaic_streaming_dataset(tmp_path: Path, workers: int) -> None:
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns={"x": "float32"}) as writer:
        for number in range(40):
            writer.write({"x": np.float32(number)})

    def make() -> Any:
        streaming.base.util.clean_stale_shared_memory()
        stream = streaming.StreamingDataset(local=str(tmp_path / "mds"), batch_size=4, shuffle=True)
        return loader(stream, workers=workers, collate=column("x"))

    assert_resumes(make, [3, 7])
