"""Results for MLflow. conf/callbacks/mlflow.yaml explains the arguments."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpframe.core.errors import RunInterrupted
from mpframe.integrations.tracking_service import TrackingService, picture_of
from mpframe.training.run_context import RunContext

_TAG = "mpframe.run"  # Finds the run again.
_MOST = 1000  # numbers in a request
_LONGEST = 6000  # characters of a parameter


@dataclass(eq=False, kw_only=True)
class MLflow(TrackingService):
    """Logs to a run of MLflow, which has no histograms.

    It deletes no number, so those that it has from before a kill are not logged again.
    """

    package = "mlflow"
    tracking_uri: str | None = None
    experiment: str = "mpframe"
    tags: Mapping[str, str] = field(default_factory=dict)

    def open(self, context: RunContext, step: int) -> None:
        client = self._client = self.api.MlflowClient(self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        place = found.experiment_id if found else client.create_experiment(self.experiment)
        older = client.search_runs([place], f"tags.`{_TAG}` = '{context.identity}'")
        tags = {**self.tags, _TAG: context.identity}
        run = older[0] if older else client.create_run(place, tags=tags, run_name=self.name)
        self._run, self._goes_on = run.info.run_id, bool(older)
        self._last: dict[str, int] = {}
        client.update_run(self._run, "RUNNING")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now, metric = int(1000 * time.time()), self.api.entities.Metric
        named = {_name(tag): value for tag, value in values.items()}
        new = [metric(n, v, now, step) for n, v in named.items() if step > self._last_step(n)]
        for first in range(0, len(new), _MOST):
            self._client.log_batch(self._run, metrics=new[first : first + _MOST])

    def image(self, tag: str, png: bytes, step: int) -> None:
        # If the step is taken again, the file is replaced.
        file = f"{_name(tag)}/step_{step:08d}.png"
        self._client.log_image(self._run, picture_of(png), artifact_file=file)

    def text(self, tag: str, markdown: str) -> None:
        self._client.log_text(self._run, markdown, f"{_name(tag)}.md")

    def options(self, values: Mapping[str, object]) -> None:
        """Log parameters. The first start's stay, because MLflow changes none."""
        known, param = self._client.get_run(self._run).data.params, self.api.entities.Param
        named = {_name(path): str(value)[:_LONGEST] for path, value in values.items()}
        new = [param(name, value) for name, value in named.items() if name not in known]
        self._client.log_batch(self._run, params=new)

    def close(self, error: BaseException | None = None) -> None:
        failed = "KILLED" if isinstance(error, RunInterrupted) else "FAILED"
        self._client.set_terminated(self._run, "FINISHED" if error is None else failed)

    def _last_step(self, name: str) -> int:
        """Return the last step at which an earlier start has logged a number, or -1."""
        if self._goes_on and name not in self._last:
            points = self._client.get_metric_history(self._run, name)
            self._last[name] = max((point.step for point in points), default=-1)
        return self._last.get(name, -1)


def _name(tag: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", tag, flags=re.ASCII)
