"""Results for Aim: `callbacks=aim`. docs/tensorboard.md shows it at work."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpframe.integrations.tracking_service import (
    TrackingService,
    default_name,
    picture,
    status_of,
)
from mpframe.training.run_context import RunContext

log = logging.getLogger(__name__)


class Aim(TrackingService):
    """Logs to a run of Aim, which a resumed run goes on with. A step taken again replaces itself.

    Args:
        repo: a folder, made if it is missing, or a server. None: Aim's choice.
        experiment: its name.
        name: of the run. None: the last two folders of its path.
        tags: of the run.
        init: other arguments of `aim.Run`.
        on_error: `warn` or `stop`.
    """

    def __init__(
        self,
        repo: str | None = None,
        experiment: str = "mpframe",
        name: str | None = None,
        tags: Sequence[str] = (),
        init: Mapping[str, Any] | None = None,
        on_error: str = "warn",
    ) -> None:
        super().__init__("aim", on_error)
        self._repo, self._name, self._tags = repo, name, tags
        # The console may show what the log hides.
        self._init = {"experiment": experiment, "capture_terminal_logs": False, **(init or {})}
        self._hash: str | None = None

    def open(self, context: RunContext, step: int) -> None:
        repo = self.api.sdk.repo_utils.get_repo(self._repo)
        if self._hash is not None and not repo.run_exists(self._hash):
            log.warning("warning: %s: no run %s in %s; begins one", self.option, self._hash, repo)
            self._hash = None
        logging.getLogger("aim.sdk.reporter").setLevel(logging.WARNING)
        goes_on = self._hash is not None  # A killed start may have left its lock.
        self._run = self.api.Run(self._hash, repo=repo, force_resume=goes_on, **self._init)
        if not goes_on:
            self._run.name = self._name or default_name(context)
            for tag in self._tags:
                self._run.add_tag(tag)
        self._hash, self._run["status"] = self._run.hash, "running"

    def state_dict(self) -> dict[str, Any]:
        return {"hash": self._hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._hash = None if state["hash"] is None else str(state["hash"])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.track(dict(values), step=step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        self._run.track(self.api.Image(picture(png)), name=tag, step=step)

    def histogram(
        self, tag: str, counts: Sequence[float], edges: Sequence[float], step: int
    ) -> None:
        """Log as many bins of equal width, which Aim wants."""
        below = np.concatenate([[0.0], np.cumsum(counts)])
        even = np.linspace(edges[0], edges[-1], len(edges))
        kept = np.diff(np.interp(even, edges, below))
        shown = self.api.Distribution(hist=kept, bin_range=(edges[0], edges[-1]))
        self._run.track(shown, name=tag, step=step)

    def text(self, tag: str, markdown: str) -> None:
        self._run.track(self.api.Text(markdown), name=tag, step=0)

    def hparams(
        self, config: Mapping[str, Any], metrics: Iterable[str], first: Collection[str] = ()
    ) -> None:
        self._run["hparams"] = dict(config)

    def close(self, error: BaseException | None = None) -> None:
        self._run["status"] = status_of(error)
        if error is None:
            self._run.report_successful_finish()
        self._run.close()
