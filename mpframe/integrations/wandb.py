"""Results for Weights & Biases: `callbacks=wandb`. docs/tensorboard.md shows it at work."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from mpframe.integrations.tracking_service import TrackingService, default_name, picture
from mpframe.training.run_context import RunContext

# Its records of the console and of the command line could hold secrets.
_SETTINGS = {"console": "off", "x_disable_meta": True}


class Wandb(TrackingService):
    """Logs to a run of Weights & Biases, which a resumed run goes on with.

    Args:
        project, name, tags, mode: as of `wandb.init`. `mode` is online, offline or disabled.
        init: other arguments of `wandb.init`.
        on_error: `warn` or `stop`.

    Wandb takes steps only in their order. Steps that it has from before a kill are not sent again,
    and a picture of an earlier step appears at the present one.
    """

    def __init__(
        self,
        project: str = "mpframe",
        name: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
        init: Mapping[str, Any] | None = None,
        on_error: str = "warn",
    ) -> None:
        super().__init__("wandb", on_error)
        self._name = name
        self._init = {"project": project, "tags": list(tags), "mode": mode, **(init or {})}

    def open(self, context: RunContext, step: int) -> None:
        given: dict[str, Any] = {"dir": str(context.folder)}
        given["name"] = self._name or default_name(context)
        given |= {"id": context.identity, "resume": "allow", "reinit": "create_new", **self._init}
        given["settings"] = _SETTINGS | given.get("settings", {})
        self._run = self.api.init(**given)
        self._first, self._next = step, self._run.step

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, dict(values))

    def image(self, tag: str, png: bytes, step: int) -> None:
        self._log(step, {tag: self.api.Image(picture(png))})

    def histogram(
        self, tag: str, counts: Sequence[float], edges: Sequence[float], step: int
    ) -> None:
        self._log(step, {tag: self.api.Histogram(np_histogram=(counts, edges))})

    def text(self, tag: str, markdown: str) -> None:
        self._log(self._first, {tag: self.api.Html(f"<pre>{escape(markdown)}</pre>")})

    def hparams(
        self, config: Mapping[str, Any], metrics: Iterable[str], first: Collection[str] = ()
    ) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def close(self, error: BaseException | None = None) -> None:
        self._run.finish(exit_code=int(error is not None))

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if not self._first < step < self._next:
            self._run.log(values, step=max(step, self._run.step))
