"""Results for Weights & Biases. conf/callbacks/wandb.yaml explains the arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from mpframe.integrations.tracking_service import TrackingService, picture_of
from mpframe.tracking.logger import Numbers
from mpframe.training.run_context import RunContext


@dataclass(eq=False, kw_only=True)
class Wandb(TrackingService):
    """Logs to a run of wandb, which takes steps only in their order.

    Steps that it has from before a kill are not sent again. A picture of an earlier step appears
    at the present one.
    """

    package = "wandb"
    project: str = "mpframe"
    tags: Sequence[str] = ()
    mode: str | None = None
    init: Mapping[str, Any] = field(default_factory=dict)

    def open(self, context: RunContext, step: int) -> None:
        options = {"project": self.project, "name": self.name, "tags": list(self.tags)}
        options |= {"mode": self.mode, "dir": str(context.folder), "id": context.identity}
        options |= {"resume": "allow", "reinit": "create_new", **self.init}
        # Its records of the console and of the command line could hold secrets.
        settings = {"console": "off", "x_disable_meta": True, **self.init.get("settings", {})}
        self._run = self.api.init(**options | {"settings": settings})
        self._first, self._next = step, self._run.step

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._first < step < self._next:
            self._run.log(dict(values), step=max(step, self._run.step))

    def image(self, tag: str, png: bytes, step: int) -> None:
        self.scalars(step, {tag: self.api.Image(picture_of(png))})

    def histogram(self, tag: str, counts: Numbers, edges: Numbers, step: int) -> None:
        self.scalars(step, {tag: self.api.Histogram(np_histogram=(counts, edges))})

    def text(self, tag: str, markdown: str) -> None:
        self.scalars(self._first, {tag: self.api.Html(f"<pre>{escape(markdown)}</pre>")})

    def options(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def close(self, error: BaseException | None = None) -> None:
        self._run.finish(exit_code=int(error is not None))
