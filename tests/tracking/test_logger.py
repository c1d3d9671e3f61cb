"""A logger that a callback adds gets what TensorBoard gets; errors of one; the curves as JSON."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import Log, Patch, full, refused
from in_process import cut, differing, events, results, scalars, texts, train

from mpframe.core.callback import Callback
from mpframe.core.errors import MpframeError, UserCodeError
from mpframe.tracking import json_lines
from mpframe.tracking.json_lines import FILE_NAME, JsonLines
from mpframe.tracking.logger import Logger, Loggers
from mpframe.tracking.tracker import Tracker

SMALL = ("model=mlp", "model.hidden=8", "dataset.batch_size=256", "trainer.log_every=1")
SMALL += ("trainer.epochs=2", "trainer.checkpoint_every=2", "trainer.keep_last=9")
JSON = (*SMALL, "callbacks=[default,jsonl]")


class Collected(Callback, Logger):
    """A user's logger, added by itself as a callback."""

    def __init__(self) -> None:
        self.got: dict[str, Any] = defaultdict(list)

    def setup(self, trainer: Any, context: Any) -> None:
        context.tracker.add(self)
        SEEN.append(self)

    def scalars(self, step: int, values: Any) -> None:
        for tag, value in values.items():
            assert type(tag) is str
            self.got[tag].append((step, value))

    def image(self, tag: str, png: bytes, step: int) -> None:
        self.got[tag].append((step, png))

    def histogram(self, tag: str, counts: Any, edges: Any, step: int) -> None:
        self.got[tag].append((step, counts))

    def text(self, tag: str, markdown: str) -> None:
        self.got[tag].append((1, markdown))

    def options(self, values: Any) -> None:
        self.got["options"].append(values)

    def close(self, error: BaseException | None = None) -> None:
        self.got["close"].append(error)


SEEN: list[Collected] = []


@pytest.mark.slow
def test_a_logger_of_a_user_gets_what_tensorboard_gets(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MY_TOKEN", "abcdefghijkl")
    mine = f"+callbacks.mine._target_={__name__}.Collected"
    train(tmp_path, *SMALL, "callbacks.ranges.every=5", mine, "run_name=abcdefghijkl")
    got, read = SEEN.pop().got, events(tmp_path)
    assert got.pop("close") == [None]
    (options,) = got.pop("options")
    assert (options["dtype"], options["seed"]) == ("mixed float16", 0)
    shown = read.Tags()
    kinds = [shown[kind] for kind in ("scalars", "images", "histograms")]
    assert min(map(len, kinds)) >= 4
    written = [tag for tag in shown["tensors"] if tag.startswith("text/")]
    assert got.keys() == {*written, *(tag for kind in kinds for tag in kind)}
    assert len(written) == 4
    assert all(got[tag] == texts(tmp_path, tag) for tag in written)
    assert "abcdefghijkl" not in str(got)
    rounded = {tag: [(s, float(torch.tensor(v))) for s, v in got[tag]] for tag in shown["scalars"]}
    assert rounded == scalars(tmp_path)


class Failing(Logger):
    def __init__(self) -> None:
        self.asked = 0

    def scalars(self, step: int, values: Any) -> None:
        self.asked += 1
        raise ConnectionError("no route")

    def close(self, error: BaseException | None = None) -> None:
        raise ValueError("closed twice")


def test_a_logger_that_fails_ends_the_run_or_is_left_out(tmp_path: Path, caplog: Log) -> None:
    failing, other = Failing(), Collected()
    with Loggers(Tracker(tmp_path)) as loggers:
        loggers.add(failing, "warn")
        loggers.add(other)
        for step in (1, 2):
            loggers.scalars(step, {"a": 1.0})
    (told,) = caplog.messages
    said = "logger Failing raised ConnectionError (no route) at test_logger.py:"
    assert told.startswith(f"warning: {said}")
    assert told.endswith("; the run goes on without it")
    assert (failing.asked, other.got["a"]) == (1, [(1, 1.0), (2, 1.0)])
    assert scalars(tmp_path)["a"] == other.got["a"]
    with Loggers(Tracker(tmp_path / "stop")) as loggers:
        loggers.add(Failing())
        assert refused(UserCodeError, loggers.scalars, 1, {"a": 1.0}).startswith(said)


def test_closing_keeps_the_first_error_and_reports_later_ones(tmp_path: Path, caplog: Log) -> None:
    other, first = Collected(), MpframeError("the first")

    def end(error: BaseException | None) -> None:
        with Loggers(Tracker(tmp_path)) as loggers:
            loggers.add(Failing())
            loggers.add(other)
            if error:
                raise error

    assert refused(MpframeError, end, first) == "the first"
    assert "ValueError (closed twice)" in caplog.text
    assert other.got["close"] == [first]
    assert "closed twice" in refused(UserCodeError, end, None)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


def by_tag(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        for tag in line.keys() - {"step"}:
            found[tag].append((line["step"], float(torch.tensor(float(line[tag])))))
    return dict(found)


def test_lines_of_json_are_the_curves_and_no_step_is_there_twice(
    tmp_path: Path, caplog: Log
) -> None:
    """Of a run that overflows; one killed between two saves, with its last line cut short."""
    caplog.set_level("INFO")
    overflows = "loss_scaling=Backoff", "loss_scaling.init_scale=16777216"
    train(tmp_path / "whole", *JSON, *overflows)
    lines = lines_of(tmp_path / "whole")
    steps = [line["step"] for line in lines]
    assert steps == sorted({*steps})
    assert "inf" in [line.get("grad/amax") for line in lines]
    assert "loss/test" in lines[-1]
    assert by_tag(lines) == scalars(tmp_path / "whole")
    killed = cut(tmp_path / "whole", tmp_path / "killed", at=6)
    text = (killed / FILE_NAME).read_text().splitlines(keepends=True)
    (killed / FILE_NAME).write_text("".join(["null\n", *text[:8]]) + text[8][:20])
    train(killed, *JSON, *overflows, "resume=auto")
    again = lines_of(killed)
    assert "resumed from" in caplog.text
    assert [line["step"] for line in again] == steps
    stable = ("loss/train", "loss/val", "loss/test", "grad/amax", "loss_scale/scale")
    assert all(by_tag(again)[tag] == by_tag(lines)[tag] for tag in stable)
    train(tmp_path / "plain", *SMALL, *overflows)  # The same run, without the callback.
    plain, whole = (results(tmp_path / name)["state"] for name in ("plain", "whole"))
    assert all(path.startswith("/callbacks/jsonl/") for path in differing(plain, whole))


def test_lines_wait_for_room_on_the_disk(tmp_path: Path, monkeypatch: Patch) -> None:
    train(tmp_path, *JSON, "trainer.max_steps=1")
    lines = JsonLines()
    lines._path = tmp_path / FILE_NAME
    before = lines._path.read_text()
    lines.scalars(7, {"a": math.nan})
    with monkeypatch.context() as patched:
        patched.setattr(json_lines, "append_whole", full)
        with pytest.raises(OSError, match="No space"):
            lines.teardown(None, None)
    lines.scalars(8, {"a": 1.0})
    lines.teardown(None, None)
    added = '{"step": 7, "a": "nan"}\n{"step": 8, "a": 1.0}\n'
    assert lines._path.read_text() == before + added
