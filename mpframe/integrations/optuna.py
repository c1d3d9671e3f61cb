"""Ends hopeless trials of an Optuna study: the callback `Pruning`.

Hydra's sweeper completes every trial with its job's value, and fails if one has ended already. So
it gets `Storage`, in which a pruned trial stays pruned.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from hydra.core.hydra_config import HydraConfig
from optuna.pruners import BasePruner
from optuna.samplers import RandomSampler
from optuna.storages import RDBStorage
from optuna.study import Study, StudyDirection
from optuna.trial import Trial, TrialState

from mpframe.core.callback import Callback
from mpframe.core.errors import ConfigError
from mpframe.tracking.summary import Status
from mpframe.training.evaluation import Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

_OPTION = "callbacks.pruning"


@dataclass(eq=False)
class Pruning(Callback):
    """Reports each validation to a trial, and ends the run as pruned if the study's pruner says so.

    The step of a report counts validations, so that trials with other batch sizes can be compared.
    With several ranks, rank 0 asks the study.

    Args:
        storage, study: URL and name of the study. None: the ones of hydra/sweeper=pruning.
        trial: the trial's number. None: the newest running one whose parameters the job has.
        pruner: None: Optuna's `MedianPruner`.

    ConfigError: there is no such study or running trial, or its direction is not the metric's.
    """

    storage: str | None = None
    study: str | None = None
    trial: int | None = None
    pruner: BasePruner | None = None
    _trial: Trial | None = field(default=None, init=False)
    _validations: int = field(default=0, init=False)

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        if trainer.comm.is_main:
            study = self._load_study()
            self._trial = Trial(study, self._find_trial(study))

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._validations += 1
        reason = None if self._trial is None else self._report(self._trial, evaluation)
        reason = trainer.comm.broadcast_object(reason)
        if reason is not None:
            trainer.stop(reason, Status.PRUNED)

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._validations = int(state["validations"])

    def _report(self, trial: Trial, evaluation: Evaluation) -> str | None:
        """Report a validation. If it prunes the trial, return why."""
        study, value, name = trial.study, evaluation.value, evaluation.monitor
        better = StudyDirection.MAXIMIZE if evaluation.direction(name) else StudyDirection.MINIMIZE
        if evaluation.direction(name) is not None and study.directions != [better]:
            raise ConfigError(
                f"{_OPTION}.study={study.study_name}: looks for the opposite of a better {name}; "
                f"start a new study with hydra.sweeper.direction={better.name.lower()}"
            )
        trial.report(value, self._validations - 1)  # Optuna's steps begin at 0.
        if not trial.should_prune():
            return None
        study.tell(trial.number, state=TrialState.PRUNED)
        what = f"val_{name} {value:.4g} at validation {self._validations}"
        return f"{type(study.pruner).__name__}: {what} of trial {trial.number} is worse than others"

    def _load_study(self) -> Study:
        sweeper = HydraConfig.get().sweeper if HydraConfig.initialized() else {}
        name = self.study or sweeper.get("study_name")
        if isinstance(given := sweeper.get("storage"), str):
            raise ConfigError(
                f"hydra.sweeper.storage={given}: this sweeper fails if a trial is pruned; use "
                f"hydra/sweeper=pruning hydra.sweeper.storage.url={given}"
            )
        storage = self.storage or (given or {}).get("url")
        if storage is None or name is None:
            raise ConfigError(
                f"{_OPTION}.storage=null: no sweep has a study here; use hydra/sweeper=pruning, or "
                f"give {_OPTION}.storage, .study and .trial"
            )
        parts = {"sampler": RandomSampler(), "pruner": self.pruner}  # Nothing is sampled.
        try:
            return optuna.load_study(study_name=name, storage=storage, **parts)
        except KeyError:
            raise ConfigError(f"{_OPTION}.study={name}: {storage} has no such study") from None

    def _find_trial(self, study: Study) -> int:
        """Return the trial's key in the storage."""
        words = {*HydraConfig.get().overrides.task} if HydraConfig.initialized() else set()
        for trial in reversed(study.get_trials(deepcopy=False)):
            given = {f"{name}={value}" for name, value in trial.params.items()}
            fits = self.trial == trial.number or (self.trial is None and words >= given > set())
            if fits and trial.state is TrialState.RUNNING:
                return int(trial._trial_id)
        number = "null" if self.trial is None else self.trial
        raise ConfigError(
            f"{_OPTION}.trial={number}: the study {study.study_name} has no such running trial; "
            "give the number of one"
        )


class Storage:
    """Optuna's `RDBStorage` for Hydra's sweeper, in which a pruned trial stays pruned.

    It is no subclass, because Optuna would put a cache before it that misses what a job told.
    """

    def __init__(self, url: str) -> None:
        if url.startswith("sqlite:///"):
            folder = Path(url.removeprefix("sqlite:///")).parent
            folder.mkdir(parents=True, exist_ok=True)
        self._storage = RDBStorage(url)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def set_trial_values(self, trial_id: int, values: Any) -> None:
        if self._storage.get_trial(trial_id).state is not TrialState.PRUNED:
            self._storage.set_trial_values(trial_id, values)

    def set_trial_state(self, trial_id: int, state: TrialState) -> bool:
        pruned = self._storage.get_trial(trial_id).state is TrialState.PRUNED
        return pruned or self._storage.set_trial_state(trial_id, state)
