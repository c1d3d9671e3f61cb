"""A logger that is added gets what TensorBoard gets; errors of one; the curves as JSON."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import torch
from fixtures import Log, refused
from in_process import cut, scalars, train

from mpframe.core.errors import MpframeError, UserCodeError
from mpframe.tracking.json_lines import FILE_NAME
from mpframe.tracking.logger import Logger, Loggers
from mpframe.tracking.tags import Tag
from mpframe.tracking.tracker import Tracker

SMALL = ("model=mlp", "model.hidden=8", "dataset.batch_size=256", "trainer.log_every=1")
SMALL += ("trainer.epochs=2", "trainer.checkpoint_every=2", "trainer.keep_last=9")
JSON = (*SMALL, "callbacks=[default,jsonl]")


def test_a_logger_that_joins_late_has_the_texts_and_then_what_tensorboard_gets(
    tmp_path: Path,
) -> None:
    mine = Mock(spec=Logger)
    with Loggers(Tracker(tmp_path)) as loggers:
        loggers.text("text/config", "seed: 0")
        loggers.options({"seed": 0})
        loggers.add(mine)
        loggers.scalars(3, {Tag.LOSS_TRAIN: torch.tensor(0.5), "mine": 2})
        loggers.histogram("counts", [1.0], [0.0, 1.0], 3)
        loggers.flush()
    assert mine.mock_calls == [
        call.text("text/config", "seed: 0"),
        call.options({"seed": 0}),
        call.scalars(3, {"loss/train": 0.5, "mine": 2.0}),
        call.histogram("counts", [1.0], [0.0, 1.0], 3),
        call.flush(),
        call.close(None),
    ]
    assert {type(tag) for tag in mine.scalars.call_args.args[1]} == {str}
    assert scalars(tmp_path) == {"loss/train": [(3, 0.5)], "mine": [(3, 2.0)]}


class Failing(Logger):
    def __init__(self) -> None:
        self.asked = 0

    def scalars(self, step: int, values: Any) -> None:
        self.asked += 1
        raise ConnectionError("no route")

    def close(self, error: BaseException | None = None) -> None:
        raise ValueError("closed twice")


def test_a_logger_that_fails_ends_the_run_or_is_left_out(tmp_path: Path, caplog: Log) -> None:
    failing, other = Failing(), Mock(spec=Logger)
    with Loggers(Tracker(tmp_path)) as loggers:
        loggers.add(failing, "warn")
        loggers.add(other)
        for step in (1, 2):
            loggers.scalars(step, {"a": 1.0})
    (told,) = caplog.messages
    said = "logger Failing raised ConnectionError (no route) at test_logger.py:"
    assert told.startswith(f"warning: {said}")
    assert told.endswith("; the run goes on without it")
    assert failing.asked == 1
    assert other.scalars.mock_calls == [call(1, {"a": 1.0}), call(2, {"a": 1.0})]
    assert scalars(tmp_path)["a"] == [(1, 1.0), (2, 1.0)]
    loggers = Loggers(Tracker(tmp_path / "stop"))
    loggers.add(Failing())
    assert refused(UserCodeError, loggers.scalars, 1, {"a": 1.0}).startswith(said)


def test_closing_keeps_the_first_error_and_reports_later_ones(tmp_path: Path, caplog: Log) -> None:
    other, first = Mock(spec=Logger), MpframeError("the first")

    def end(error: BaseException | None) -> None:
        with Loggers(Tracker(tmp_path)) as loggers:
            loggers.add(Failing())
            loggers.add(other)
            if error:
                raise error

    assert refused(MpframeError, end, first) == "the first"
    assert "ValueError (closed twice)" in caplog.text
    other.close.assert_called_once_with(first)
    assert "closed twice" in refused(UserCodeError, end, None)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


def by_tag(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        for tag in line.keys() - {"step"}:
            found[tag].append((line["step"], float(torch.tensor(float(line[tag])))))
    return found


def test_lines_of_json_are_the_curves_and_no_step_is_there_twice(tmp_path: Path) -> None:
    """Of a run that overflows; one killed between two saves, with its last line cut short."""
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
    assert [line["step"] for line in again] == steps
    stable = ("loss/train", "loss/val", "loss/test", "grad/amax", "loss_scale/scale")
    assert all(by_tag(again)[tag] == by_tag(lines)[tag] for tag in stable)
