"""Results for MLflow: `callbacks=mlflow`. docs/tensorboard.md shows it at work."""

import re
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mpframe.integrations.tracking_service import (
    TrackingService,
    default_name,
    picture,
    status_of,
)
from mpframe.training.run_context import RunContext

_TAG = "mpframe.run"  # Finds the run again.
_MOST = 1000  # numbers in a request
_LONGEST = 6000  # characters of a parameter
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class MLflow(TrackingService):
    """Logs to a run of MLflow, which a resumed run goes on with. MLflow has no histograms.

    Args:
        tracking_uri: a server, or a store such as `sqlite:///mlflow.db`. None: MLflow's choice.
        experiment: its name, made if it is missing.
        name: of the run. None: the last two folders of its path.
        tags: of the run, by name.
        on_error: `warn` or `stop`.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "mpframe",
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        on_error: str = "warn",
    ) -> None:
        super().__init__("mlflow", on_error)
        self._uri, self._experiment = tracking_uri, experiment
        self._name, self._tags = name, dict(tags or {})
        self._last: dict[str, int] = {}

    def open(self, context: RunContext, step: int) -> None:
        client = self._client = self.api.MlflowClient(self._uri)
        found = client.get_experiment_by_name(self._experiment)
        place = found.experiment_id if found else client.create_experiment(self._experiment)
        older = client.search_runs([place], f"tags.`{_TAG}` = '{context.identity}'", max_results=1)
        self._goes_on = bool(older)
        if older:
            self._run = older[0].info.run_id
            client.update_run(self._run, "RUNNING")
        else:
            tags, name = self._tags | {_TAG: context.identity}, self._name or default_name(context)
            self._run = client.create_run(place, tags=tags, run_name=name).info.run_id

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now, kind = int(1000 * time.time()), self.api.entities.Metric
        named = {_name(tag): value for tag, value in values.items()}
        points = [kind(n, v, now, step) for n, v in named.items() if step > self._last_step(n)]
        for first in range(0, len(points), _MOST):
            self._client.log_batch(self._run, metrics=points[first : first + _MOST])

    def image(self, tag: str, png: bytes, step: int) -> None:
        # A file by this name is replaced if the step is taken again.
        file = f"{_name(tag)}/step_{step:08d}.png"
        self._client.log_image(self._run, picture(png), artifact_file=file)

    def text(self, tag: str, markdown: str) -> None:
        self._client.log_text(self._run, markdown, f"{tag}.md")

    def hparams(
        self, config: Mapping[str, Any], metrics: Iterable[str], first: Collection[str] = ()
    ) -> None:
        """Log parameters. Those of the first start stay, because MLflow changes none."""
        known, kind = self._client.get_run(self._run).data.params, self.api.entities.Param
        named = {_name(key): str(value)[:_LONGEST] for key, value in config.items()}
        new = [kind(name, value) for name, value in named.items() if name not in known]
        self._client.log_batch(self._run, params=new)

    def close(self, error: BaseException | None = None) -> None:
        self._client.set_terminated(self._run, _STATUS.get(status_of(error), "FAILED"))

    def _last_step(self, name: str) -> int:
        """Return the last step at which an earlier start has logged a number, or -1."""
        if self._goes_on and name not in self._last:
            history = self._client.get_metric_history(self._run, name)
            self._last[name] = max((point.step for point in history), default=-1)
        return self._last.get(name, -1)


def _name(tag: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", tag)
