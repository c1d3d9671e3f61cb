"""TensorBoard's view of a run: curves, texts, hyperparameters, and a page of charts.

Everything of a run goes into one event file, an append-only list of records, each written whole or
not at all

    event = (wall time, step, {tag: value, ...})

All scalars of a step share one event, because each event costs a checksum and a write. Event files
store float32, so a step count is exact up to 2^24.

A run that was killed and resumed has several event files, read in the order of their names. Each
begins with a START record at its first step s, which hides every earlier record with step >= s.
"""

import base64
import io
import itertools
import os
import socket
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.compat.proto import summary_pb2  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import plugin_data_pb2  # type: ignore[import-untyped]
from tensorboard.plugins.text import metadata as text_metadata  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard import summary as summaries

from mpframe.core.errors import MpframeError
from mpframe.files.durable import append_whole
from mpframe.tracking.logger import Logger, Numbers
from mpframe.tracking.tags import Tag, describe_tag, metric_tag

_PLUGINS = {
    "simple_value": ("scalars", summary_pb2.DATA_CLASS_SCALAR),
    "image": ("images", summary_pb2.DATA_CLASS_BLOB_SEQUENCE),
    "histo": ("histograms", summary_pb2.DATA_CLASS_TENSOR),
}


_SECONDS = 5.0  # for which records wait in memory
_NUMBERS = itertools.count()


class EventFile:
    """A new event file in a folder, which hides older files from `first_step` on.

    Files are read in the order of their names, so it is named after the current second, or the
    second after the newest file: a START record that is read too early hides nothing. Records wait
    in memory for a few seconds, or until `flush`. If the disk is full, they wait on, and are
    written with the next ones when there is room.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        unique = f"{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        others = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
        older = [int(second) for second in others if second.isdecimal()]  # Others may name theirs.
        second = max([int(time.time()), *(other + 1 for other in older)])
        self._path = folder / f"events.out.tfevents.{second:010d}.{unique}"
        self._waiting = io.BytesIO()
        self._records = RecordWriter(self._waiting)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def add(self, summary: Any, step: int) -> None:
        """Append a summary. OSError: the records that wait could not be written, and wait on."""
        self._add(Event(summary=summary, step=step))
        if time.monotonic() - self._flushed >= _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the records that wait, with the errors of `add`."""
        self._flushed = time.monotonic()
        if waiting := self._waiting.getvalue():
            append_whole(self._path, waiting)
            self._waiting.seek(0)
            self._waiting.truncate()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


class Tracker(Logger):
    """A writer of one run's event file. Use it as a context manager, or call `close`.

    Args:
        folder: the run's folder, made if it is missing.
        purge_step: the first step this tracker will write, one after the last one kept. Records of
            older event files from there on are hidden, by default all of them.

    Raises:
        MpframeError: the folder cannot be written.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self.folder = folder
        self._first_step = purge_step or 0
        with self._unwritable():
            folder.mkdir(parents=True, exist_ok=True)
            self._events = EventFile(folder, self._first_step)
        self._step, self._of_step = 0, list[str]()
        self._explained = set[str]()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by tag as one event at `step`, which grows from call to call."""
        entries = [Summary.Value(tag=tag, simple_value=n) for tag, n in values.items()]
        self._add(Summary(value=entries), step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        width, height = (int.from_bytes(png[place : place + 4]) for place in (16, 20))
        size = {"width": width, "height": height, "colorspace": 4}  # red, green, blue, opacity
        image = Summary.Image(encoded_image_string=png, **size)
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def histogram(self, tag: str, counts: Numbers, edges: Numbers, step: int) -> None:
        filled = [index for index, count in enumerate(counts) if count]
        first, last = filled[0], filled[-1] + 1
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        histogram = summaries.histogram_raw(  # type: ignore[no-untyped-call]
            tag,
            min=edges[first],
            max=edges[last],
            num=float(sum(counts)),
            sum=sum(c * m for c, m in zip(counts, middles, strict=True)),
            sum_squares=sum(c * m * m for c, m in zip(counts, middles, strict=True)),
            bucket_limits=edges[first + 1 : last + 1],
            bucket_counts=counts[first:last],
        )
        self._add(histogram, step)

    def text(self, tag: str, markdown: str) -> None:
        """Log a page of Markdown at the tracker's first step."""
        # 0-d: TensorBoard wraps the entries of any other shape into a table.
        content = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        metadata = text_metadata.create_summary_metadata(None, None)
        self._add(Summary(value=[Summary.Value(tag=tag, tensor=content, metadata=metadata)]))

    def hparams(
        self, config: Mapping[str, Any], metrics: Iterable[str], first: Collection[str] = ()
    ) -> None:
        """Enter the run into the HParams table. `mark_finished` marks it as a success.

        Pass the same keys in every run, else TensorBoard drops the columns, and keep an option
        either always a number or never: its server cannot sort a column that mixes the two.
        After a resume the values of the first start stay.

        Args:
            config: option path -> bool, int, float, str, None, or a list of these. Numbers stay
                numbers, all else is written as text. MpframeError: a value is of another type.
            metrics: the tags that are the table's results.
            first: the keys whose columns come first, because runs differ in them.
        """
        values = {key: _hparam(key, value) for key, value in config.items()}
        experiment, start, _ = summaries.hparams(values, dict.fromkeys(metrics))  # type: ignore[no-untyped-call]
        self._add(_with_first(experiment, first))
        self._add(start)

    def mark_finished(self) -> None:
        """Mark the run as a success in the HParams table, for good: no run that may be resumed."""
        *_, success = summaries.hparams({}, {})  # type: ignore[no-untyped-call]
        self._add(success)

    def layout(self, metrics: Iterable[str] = ()) -> None:
        """Lay out the custom-scalars page, with a chart for each validation metric by name."""
        self._add(summaries.custom_scalars(_charts(metrics)))  # type: ignore[no-untyped-call]

    def last_step(self) -> dict[str, Any]:
        """Return the last step and all that was logged at it: plain numbers and strings."""
        return {"step": self._step, "events": list(self._of_step)}

    def write_again(self, last_step: Mapping[str, Any]) -> None:
        """Log again what `last_step` returned, checked, unless an older file shows it."""
        if last_step["step"] < self._first_step:
            return
        for event in last_step["events"]:
            self._add(_decode(event), last_step["step"])

    def flush(self) -> None:
        with self._unwritable():
            self._events.flush()

    def close(self, error: BaseException | None = None) -> None:
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except MpframeError:
            if error is None:  # The first error is the one to report.
                raise

    def _add(self, summary: Summary, step: int | None = None) -> None:
        if step is not None:
            self._keep(summary, step)
        for value in summary.value:
            if value.tag not in self._explained:
                self._explained.add(value.tag)
                _explain(value)
        with self._unwritable():
            self._events.add(summary, self._first_step if step is None else step)

    def _keep(self, summary: Summary, step: int) -> None:
        if step > self._step:
            self._step, self._of_step = step, []
        if step == self._step:
            self._of_step.append(base64.b64encode(summary.SerializeToString()).decode())

    @contextmanager
    def _unwritable(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise MpframeError(
                f"run folder {self.folder}: the event file cannot be written ({error.strerror}); "
                "free space or set hydra.run.dir to a writable folder"
            ) from error


def check_events(last_step: Any) -> dict[str, Any]:
    """Return a checkpoint's `last_step`. ValueError, TypeError or LookupError if it is none."""
    events = [str(event) for event in last_step["events"]]
    for event in events:
        _decode(event)
    return {"step": int(last_step["step"]), "events": events}


def _explain(value: Any) -> None:
    """Describe a tag in its first value, for all later ones.

    The fast reader of TensorBoard's server takes a description only with plugin and data class.
    """
    description = describe_tag(value.tag)
    if description is None:
        return
    value.metadata.summary_description = description
    if plugin := _PLUGINS.get(value.WhichOneof("value")):
        value.metadata.plugin_data.plugin_name, value.metadata.data_class = plugin


def _decode(event: str) -> Any:
    try:
        return Summary.FromString(base64.b64decode(event))
    except DecodeError as error:
        raise ValueError(str(error)) from None


def _with_first(experiment: Any, first: Collection[str]) -> Any:
    """Mark the columns of `first` as those that differ, which TensorBoard shows first."""
    plugin_data = experiment.value[0].metadata.plugin_data
    content = plugin_data_pb2.HParamsPluginData.FromString(plugin_data.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in first
    plugin_data.content = content.SerializeToString()
    return experiment


def _hparam(key: str, value: object) -> str | int | float:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return "[" + ", ".join(str(_hparam(key, entry)) for entry in value) + "]"
    raise MpframeError(
        f"{key}={value!r}: a {type(value).__name__} cannot be a hyperparameter; allowed are bool, "
        "int, float, str, None and lists of those: pass a mapping's entries one by one"
    )


def _charts(metrics: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    def lines(*tags: str) -> list[Any]:
        # Tags are matched as regular expressions from their start. No tag is the start of another.
        return ["Multiline", list(tags)]

    return {
        "training": {
            "loss": lines(Tag.LOSS_TRAIN, Tag.LOSS_VAL),
            **{name: lines(metric_tag(name)) for name in metrics},
            "learning rate": lines(Tag.LR),
            "samples per second, lately": lines(Tag.SAMPLES_PER_SECOND),
            "waiting for batches": lines(Tag.INPUT_FRACTION),
        },
        "loss scaling": {
            "scale, log2": lines(Tag.LOG2_SCALE),
            "skipped steps": lines(Tag.SKIPPED_TOTAL),
        },
        "gradients": {"norm and amax": lines(Tag.GRAD_NORM, Tag.GRAD_AMAX)},
    }
