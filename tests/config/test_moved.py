"""What a `_target_` of 0.1.0 named has a new name: whoever writes the old one is told it."""

from pathlib import Path

import pytest
from fixtures import refused
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import OmegaConf

from mpframe.config.command_line import compose_named, without_hydra
from mpframe.config.stored import config_of, find_moved
from mpframe.core.errors import CheckpointError, ConfigError
from mpframe.run.target import find_target

# By the new module; the second of two words is the new last part.
_WORKLOADS = {
    "detection": [
        *("data.scenes", "data.MeanAveragePrecision", "models.ssd SSD", "objectives.detection"),
    ],
    "gan": [
        *("data.adversarial", "data.digits_gan", "models.gan Gan"),
        *("objectives.adversarial.discriminator_objective",),
        *("objectives.adversarial.generator_objective",),
    ],
    "images": ["models.cnn", "models.mlp", "models.resnet18"],
    "segmentation.data": ["data.mask_folder", "data.shapes", "data.segmentation"],
    "segmentation.model": ["models.unet UNet", "objectives.dice_cross_entropy"],
    "speech": ["data.phonemes", "data.LabelErrorRate", "models.lstm LSTM", "objectives.ctc"],
    "tables.data": ["data.csv_table"],
    "tables.model": ["models.tabular Tabular", "objectives.LogRegression"],
    "text.classification": ["data.text_folder"],
    "text.language_model": ["data.next_token", "models.gpt GPT"],
    "text.tweets": ["data.tweet_spans", "data.WordJaccard"],
}

_HOUSE = {
    "training.probe": ["loss_scaling.auto", "core.loss_scaling.auto"],
    "core.loss_scaling": [f"loss_scaling.{name}" for name in ("Static", "Backoff", "LogMax")],
    "core.objective": ["objectives.supervised"],
    "training.objectives": [
        f"{old}.{name}"
        for old in ("objectives", "core.objective")
        for name in ("cross_entropy", "mse", "model_loss")
    ],
    "training.callbacks.schedules": [
        *("optim.schedules.constant", "optim.schedules.exponential", "optim.schedules.onecycle"),
        *("optim.schedules.piecewise_constant", "optim.schedules.poly"),
        *("optim.schedules.transformer", "optim.schedules.warmup_cosine"),
    ],
    "lab": ["numerics.watch_ranges"],
    "lab.autopsy.callback": ["numerics.autopsy.callback.Autopsy"],
    "training.callbacks.console": [
        *("training.callbacks.log_lines.LogLines", "training.callbacks.progress_bar.ProgressBar"),
    ],
    "training.callbacks.guards": [
        "training.callbacks.early_stopping.EarlyStopping",
        "training.callbacks.saturation.SaturationWarning",
    ],
    "training.callbacks.step_hooks": ["training.callbacks.larc.LARC"],
    "training.callbacks.records": [
        *("training.callbacks.amax_record.RecordAmax", "training.callbacks.csv_log.CsvLog"),
        "training.callbacks.curves.Curves",
    ],
}

MOVED = {
    f"mpframe.{old}": f"mpframe.{module}.{new or old.rpartition('.')[2]}"
    for module, names in {**{f"workloads.{k}": v for k, v in _WORKLOADS.items()}, **_HOUSE}.items()
    for old, _, new in (name.partition(" ") for name in names)
}

OLD, NEW = "mpframe.models.gpt", "mpframe.workloads.text.language_model.GPT"


def test_only_the_new_name_is_there() -> None:
    for old, new in MOVED.items():
        assert get_object(new).__name__ == new.rpartition(".")[2]
        assert new.lower().endswith("." + old.rpartition(".")[2].lower())
        with pytest.raises((ImportError, HydraException, ValueError)):
            get_object(old)


def test_a_name_that_moved_is_found_and_no_other() -> None:
    for old, new in MOVED.items():
        assert (find_moved(old), find_moved(new)) == (new, None)
    for name in ("mpframe.models.nope", "my_pkg.GPT", "mpframe.lab.hints.find", "mpframe", 3, None):
        assert find_moved(name) is None


def test_the_old_name_is_answered_with_the_new_one() -> None:
    said = refused(ConfigError, find_target, "model", OLD)
    assert said == f"model._target_={OLD}: is now {NEW}"
    _, composed = compose_named(["model=gpt", "dataset=next_token", "dataset.root=texts"])
    stored = OmegaConf.to_yaml(without_hydra(composed), resolve=True).replace(NEW, OLD)
    file, line = Path("config.yaml"), f"model._target_={OLD} is now {NEW}; add model._target_={NEW}"
    assert refused(CheckpointError, config_of, stored, file, []) == f"{file}: {line}"
    again = config_of(stored, file, [f"model._target_={NEW}"])
    assert again.model["_target_"] == NEW
