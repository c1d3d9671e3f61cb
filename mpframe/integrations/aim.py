"""Results for Aim. conf/callbacks/aim.yaml explains the arguments."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpframe.integrations.tracking_service import TrackingService, picture_of
from mpframe.tracking.logger import Numbers
from mpframe.training.run_context import RunContext


@dataclass(eq=False, kw_only=True)
class Aim(TrackingService):
    """Logs to a run of Aim, in which a step that is taken again replaces itself."""

    package = "aim"
    repo: str | None = None
    experiment: str = "mpframe"
    tags: Sequence[str] = ()
    init: Mapping[str, Any] = field(default_factory=dict)
    _hash: str | None = field(default=None, init=False)

    def open(self, context: RunContext, step: int) -> None:
        logging.getLogger("aim.sdk.reporter").setLevel(logging.WARNING)  # It reports its threads.
        repo = self.api.sdk.repo_utils.get_repo(self.repo)
        goes_on = self._hash is not None and repo.run_exists(self._hash)
        self._hash = self._hash if goes_on else None
        # A record of the console could hold secrets. A kill may have left the lock.
        options = {"capture_terminal_logs": False, "force_resume": goes_on, **self.init}
        run = self.api.Run(self._hash, repo=repo, experiment=self.experiment, **options)
        run.name = self.name
        for tag in self.tags:
            run.add_tag(tag)
        self._run, self._hash, run["status"] = run, run.hash, "running"

    def state_dict(self) -> dict[str, Any]:
        return {"hash": self._hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._hash = str(state["hash"])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.track(dict(values), step=step)

    def image(self, tag: str, png: bytes, step: int) -> None:
        self._run.track(self.api.Image(picture_of(png)), name=tag, step=step)

    def histogram(self, tag: str, counts: Numbers, edges: Numbers, step: int) -> None:
        """Log as many bins of equal width, which Aim wants."""
        even = np.linspace(edges[0], edges[-1], len(edges))
        bins = np.diff(np.interp(even, edges, [0, *np.cumsum(counts)]))
        shown = self.api.Distribution(hist=bins, bin_range=(edges[0], edges[-1]))
        self._run.track(shown, name=tag, step=step)

    def text(self, tag: str, markdown: str) -> None:
        self._run.track(self.api.Text(markdown), name=tag, step=0)

    def options(self, values: Mapping[str, Any]) -> None:
        self._run["hparams"] = dict(values)

    def close(self, error: BaseException | None = None) -> None:
        self._run["status"] = "finished" if error is None else "failed"
        if error is None:
            self._run.report_successful_finish()
        self._run.close()
