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
import os
import socket
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

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

# The fast reader of TensorBoard's server takes a tag's description only with plugin and data class.
_PLUGINS = {
    "simple_value": ("scalars", summary_pb2.DATA_CLASS_SCALAR),
    "image": ("images", summary_pb2.DATA_CLASS_BLOB_SEQUENCE),
    "histo": ("histograms", summary_pb2.DATA_CLASS_TENSOR),
}

_SECONDS = 5.0  # for which records wait in memory
_NUMBERS = count()


class Tracker(Logger):
    """A writer of one run's new event file. Records wait in memory for a few seconds, or `flush`.

    If the disk is full, they wait on, and are written with the next ones when there is room.

    Args:
        folder: the run's folder, made if it is missing.
        purge_step: the first step this tracker will write, one after the last one kept. Records of
            older event files from there on are hidden, by default all of them.

    Raises:
        MpframeError: the folder cannot be written.
    """

    def __init__(self, folder: Path, purge_step: int = 0) -> None:
        self.folder, self._first_step = folder, purge_step
        self._step, self._of_step = 0, list[str]()
        self._explained = set[str]()
        with self._unwritable():
            folder.mkdir(parents=True, exist_ok=True)
            self._path = _name_event_file(folder)
        self._waiting = io.BytesIO()
        self._records = RecordWriter(self._waiting)
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self.flush()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        entries = [Summary.Value(tag=tag, simple_value=n) for tag, n in values.items()]
        self._add(Summary(value=entries), step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        width, height = (int.from_bytes(png[place : place + 4]) for place in (16, 20))
        size = {"width": width, "height": height, "colorspace": 4}  # red, green, blue, opacity
        image = Summary.Image(encoded_image_string=png, **size)
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def histogram(self, tag: str, counts: Numbers, edges: Numbers, step: int) -> None:
        filled = [index for index, number in enumerate(counts) if number]
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
        # 0-d: TensorBoard wraps the entries of any other shape into a table.
        content = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        metadata = text_metadata.create_summary_metadata(None, None)
        self._add(Summary(value=[Summary.Value(tag=tag, tensor=content, metadata=metadata)]))

    def hparams(
        self, config: Mapping[str, Any], metrics: Iterable[str], first: Collection[str] = ()
    ) -> None:
        """Enter the run into the HParams table. After a resume the first start's values stay.

        Args:
            config: value by option. Numbers stay numbers, all else is written as text. TensorBoard
                drops a column that some runs lack, and cannot sort one that mixes both.
            metrics: the tags that are the table's results.
            first: the options whose columns come first, because runs differ in them.
        """
        values = {
            key: str(value).lower() if value is None or isinstance(value, bool) else value
            for key, value in config.items()
        }
        experiment, start, _ = summaries.hparams(values, dict.fromkeys(metrics))  # type: ignore[no-untyped-call]
        plugin_data = experiment.value[0].metadata.plugin_data
        content = plugin_data_pb2.HParamsPluginData.FromString(plugin_data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in first  # TensorBoard shows these columns first.
        plugin_data.content = content.SerializeToString()
        self._add(experiment)
        self._add(start)

    def mark_finished(self) -> None:
        """Mark the run as a success in the HParams table, for good: no run that may be resumed."""
        *_, success = summaries.hparams({}, {})  # type: ignore[no-untyped-call]
        self._add(success)

    def layout(self, metrics: Iterable[str] = ()) -> None:
        """Lay out the custom-scalars page, with a chart for each validation metric by name."""
        # Tags are matched as regular expressions from their start. No tag is the start of another.
        pages: dict[str, dict[str, list[str]]] = {
            "training": {
                "loss": [Tag.LOSS_TRAIN, Tag.LOSS_VAL],
                **{name: [metric_tag(name)] for name in metrics},
                "learning rate": [Tag.LR],
                "samples per second, lately": [Tag.SAMPLES_PER_SECOND],
                "waiting for batches": [Tag.INPUT_FRACTION],
            },
            "loss scaling": {"scale, log2": [Tag.LOG2_SCALE], "skipped steps": [Tag.SKIPPED_TOTAL]},
            "gradients": {"norm and amax": [Tag.GRAD_NORM, Tag.GRAD_AMAX]},
        }
        charts = {
            page: {name: ["Multiline", tags] for name, tags in named.items()}
            for page, named in pages.items()
        }
        self._add(summaries.custom_scalars(charts))  # type: ignore[no-untyped-call]

    def last_step(self) -> dict[str, Any]:
        """Return the last step and all that was logged at it: plain numbers and strings."""
        return {"step": self._step, "events": list(self._of_step)}

    def write_again(self, step: int, logged: Iterable[Any]) -> None:
        """Log again what `read_step` returned, unless an older file shows it."""
        if step >= self._first_step:
            for summary in logged:
                self._add(summary, step)

    def flush(self) -> None:
        self._flushed = time.monotonic()
        if waiting := self._waiting.getvalue():
            with self._unwritable():
                append_whole(self._path, waiting)
            self._waiting.seek(0)
            self._waiting.truncate()

    def close(self, error: BaseException | None = None) -> None:
        self.flush()

    def _add(self, summary: Summary, step: int | None = None) -> None:
        if step is not None and step > self._step:
            self._step, self._of_step = step, []
        if step == self._step:
            self._of_step.append(base64.b64encode(summary.SerializeToString()).decode())
        for value in summary.value:
            if value.tag not in self._explained:
                self._explained.add(value.tag)
                _explain(value)
        self._write(Event(summary=summary, step=self._first_step if step is None else step))
        if time.monotonic() - self._flushed >= _SECONDS:
            self.flush()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())

    @contextmanager
    def _unwritable(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise MpframeError(
                f"run folder {self.folder}: the event file cannot be written ({error.strerror}); "
                "free space or set hydra.run.dir to a writable folder"
            ) from error


def read_step(last_step: Any) -> tuple[int, list[Any]]:
    """Return the step of a `last_step`, and what was logged at it.

    ValueError, TypeError or LookupError: a checkpoint holds something else.
    """
    try:
        logged = [Summary.FromString(base64.b64decode(event)) for event in last_step["events"]]
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return int(last_step["step"]), logged


def _name_event_file(folder: Path) -> Path:
    """Name a file after the current second or, to be read last, the one behind the newest's."""
    unique = f"{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
    others = (path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*"))
    older = [int(second) for second in others if second.isdecimal()]  # Others may name theirs.
    second = max([int(time.time()), *(other + 1 for other in older)])
    return folder / f"events.out.tfevents.{second:010d}.{unique}"


def _explain(value: Any) -> None:
    """Describe a tag in its first value, for all later ones."""
    if description := describe_tag(value.tag):
        value.metadata.summary_description = description
        if plugin := _PLUGINS.get(value.WhichOneof("value")):
            value.metadata.plugin_data.plugin_name, value.metadata.data_class = plugin
