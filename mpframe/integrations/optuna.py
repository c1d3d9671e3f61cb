"""Ends hopeless trials of an Optuna study: the callback `Pruning`, and a storage for Hydra's sweeper.

After each validation the callback reports the monitored value. If the study's pruner finds the
trial worse than others at this point, the run ends with the status `pruned`, and so does the trial.

The sweeper is told a job's value and knows no pruned job. It would fail to complete a trial that is
pruned already, so it gets `Storage`, in which such a trial stays as it is.
"""

import logging
from pathlib import Path
from typing import Any

import optuna
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from optuna.pruners import BasePruner
from optuna.samplers import RandomSampler
from optuna.storages import RDBStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from mpframe.core.callback import Callback
from mpframe.core.errors import ConfigError
from mpframe.tracking.summary import Status
from mpframe.training.evaluation import Evaluation
from mpframe.training.run_context import RunContext
from mpframe.training.trainer import Trainer

log = logging.getLogger(__name__)

_OPTION = "callbacks.pruning"


class Pruning(Callback):
    """Reports each validation to a trial, and ends the run if the trial is pruned.

    The step of a report is the number of the validation, so trials with other batch sizes can be
    compared. With several ranks, rank 0 asks the study.

    Args:
        storage: the URL of the study's storage. None: the one of Hydra's sweeper.
        study: the study's name. None: the one of Hydra's sweeper.
        trial: the trial's number. None: the running trial whose parameters are the job's options.
        pruner: decides. None: Optuna's `MedianPruner`.

    Raises:
        ConfigError: there is no such study, no such trial, or it has ended, or later, the study
            looks for the opposite of what is better.
    """

    def __init__(
        self,
        storage: str | None = None,
        study: str | None = None,
        trial: int | None = None,
        pruner: BasePruner | None = None,
    ) -> None:
        self._storage, self._study, self._number, self._pruner = storage, study, trial, pruner
        self._trial: Trial | None = None
        self._validations = 0

    def setup(self, trainer: Trainer, context: RunContext) -> None:
        """Find the trial."""
        if trainer.comm.is_main:
            study = self._load_study()
            trial = _find_trial(study, self._number)
            log.info("trial %d of the study %s", trial.number, study.study_name)
            self._trial = Trial(study, trial._trial_id)

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
        """Report a validation, and return the reason if the trial is pruned, which it is then."""
        study, value = trial.study, evaluation.value
        _check_direction(study, evaluation)
        trial.report(value, self._validations)
        if not trial.should_prune():
            return None
        study.tell(trial.number, state=TrialState.PRUNED)
        return (
            f"pruned by {type(study.pruner).__name__}: val_{evaluation.monitor} {value:.4g} at "
            f"validation {self._validations} of trial {trial.number}, others were better"
        )

    def _load_study(self) -> Study:
        storage, name = self._storage or _of_sweeper("storage.url"), self._study
        name = name or _of_sweeper("study_name")
        if isinstance(given := _of_sweeper("storage"), str):
            raise ConfigError(
                f"hydra.sweeper.storage={given}: this sweeper takes a pruned trial for an error; "
                f"use hydra/sweeper=pruning with hydra.sweeper.storage.url={given}"
            )
        for option, value in {"storage": storage, "study": name}.items():
            if value is None:
                raise ConfigError(
                    f"{_OPTION}.{option}=null: there is no sweep that has one; use "
                    f"hydra/sweeper=pruning, or give {_OPTION}.{option}"
                )
        try:
            parts = {"sampler": RandomSampler(), "pruner": self._pruner}  # Nothing is sampled.
            return optuna.load_study(study_name=name, storage=storage, **parts)
        except KeyError:
            raise ConfigError(
                f"{_OPTION}.study={name}: there is no such study in {storage}; make it with "
                "optuna.create_study, or correct the name"
            ) from None


def _of_sweeper(path: str) -> Any:
    """Return an option of Hydra's sweeper, or None if there is none."""
    return OmegaConf.select(HydraConfig.get().sweeper, path) if HydraConfig.initialized() else None


def _find_trial(study: Study, number: int | None) -> FrozenTrial:
    """Return the trial of this number, or the newest running one with the job's options."""
    trials = study.get_trials(deepcopy=False)
    if number is None:
        words = {*HydraConfig.get().overrides.task} if HydraConfig.initialized() else set()
        trials = [t for t in trials if t.params and words >= {f"{k}={v}" for k, v in t.params.items()}]
        trials = [trial for trial in trials if trial.state is TrialState.RUNNING]
        if not trials:
            raise ConfigError(
                f"{_OPTION}.trial=null: no running trial of the study {study.study_name} has this "
                f"job's options; give {_OPTION}.trial=NUMBER"
            )
        return trials[-1]
    if not 0 <= number < len(trials):
        raise ConfigError(
            f"{_OPTION}.trial={number}: the study {study.study_name} has {len(trials)} trials, "
            "from 0; ask for a new one"
        )
    if trials[number].state is not TrialState.RUNNING:
        state = trials[number].state.name.lower()
        raise ConfigError(f"{_OPTION}.trial={number}: has ended ({state}); ask for a new one")
    return trials[number]


def _check_direction(study: Study, evaluation: Evaluation) -> None:
    higher = evaluation.direction(evaluation.monitor)
    wanted = StudyDirection.MAXIMIZE if higher else StudyDirection.MINIMIZE
    if higher is not None and study.directions != [wanted]:
        present = ", ".join(direction.name.lower() for direction in study.directions)
        raise ConfigError(
            f"{_OPTION}.study={study.study_name}: its direction is {present}, and a "
            f"{'higher' if higher else 'lower'} {evaluation.monitor} is better; start a new study "
            f"with direction={wanted.name.lower()} (hydra.sweeper.direction), or change "
            "trainer.monitor"
        )


class Storage:
    """A study's storage for Hydra's sweeper, in which a pruned trial stays pruned.

    All else is `RDBStorage`. It is no subclass, because Optuna would put its cache before it, and
    the cache does not see what a job told the study.
    """

    def __init__(self, url: str) -> None:
        if url.startswith("sqlite:///"):
            Path(url.removeprefix("sqlite:///")).absolute().parent.mkdir(parents=True, exist_ok=True)
        self._storage = RDBStorage(url)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def set_trial_values(self, trial_id: int, values: Any) -> None:
        if not self._is_pruned(trial_id):
            self._storage.set_trial_values(trial_id, values)

    def set_trial_state(self, trial_id: int, state: TrialState) -> bool:
        return self._is_pruned(trial_id) or self._storage.set_trial_state(trial_id, state)

    def _is_pruned(self, trial_id: int) -> bool:
        return bool(self._storage.get_trial(trial_id).state is TrialState.PRUNED)
