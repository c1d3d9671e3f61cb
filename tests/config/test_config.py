"""The schema, the checks behind it, and every shipped file of conf/ held against them."""

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from fixtures import Shown
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf

from mpframe.cli.commands import options
from mpframe.config import CONF, schema
from mpframe.config.command_line import check_config
from mpframe.config.schema import SECTIONS, only_watches
from mpframe.run.parts import scaling_name

SIZED_BY = {
    "bert_classifier": "text_folder", "bert_spans": "tweet_spans", "cnn": "fashion_mnist",
    "fasterrcnn": "scenes", "fcos": "scenes", "gan": "digits_gan", "gpt": "next_token",
    "lstm": "phonemes", "mlp": "digits", "own": "own", "resnet18": "image_folder",
    "ssd": "scenes", "ssdlite": "scenes", "tabular": "bikes", "unet": "shapes",
}  # fmt: skip
"""The dataset whose facts a shipped model reads."""


def files_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def groups() -> list[str]:
    folders = {str(path.parent.relative_to(CONF)) for path in CONF.rglob("*.yaml")}
    return sorted(f for f in folders if f not in (".", "rung") and not f.startswith("hydra"))


def rows() -> Iterator[list[str]]:
    """Command lines with every file of conf/, many in each."""
    pairs = [(model, SIZED_BY[model]) for model in files_of("model")]
    pairs += [("own", name) for name in files_of("dataset") if name not in SIZED_BY.values()]
    for number, (model, dataset) in enumerate(pairs):
        chosen = {"model": model, "dataset": dataset}
        for group in groups():
            files = files_of(group)
            chosen.setdefault(group, files[number % len(files)])
        del chosen["experiment"]
        words = [f"{group}={name}" for group, name in chosen.items()]
        own = [group for group, name in chosen.items() if name == "own"]
        yield words + [f"{group}._target_=my_pkg.Thing" for group in own]
    for name in files_of("experiment"):
        yield [f"experiment={name}"]


def composed(*overrides: str) -> schema.Config:
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        return check_config(compose("config", overrides=list(overrides)))


@pytest.mark.parametrize("words", [*rows()], ids=lambda words: " ".join(words[:2]))
@pytest.mark.slow
def test_every_shipped_file_composes(words: list[str]) -> None:
    assert composed(*words).dtype.mode in ("fp32", "mixed", "amp")


def test_the_rows_hold_every_file() -> None:
    chosen = {word for words in rows() for word in words}
    assert len(groups()) == 15
    assert {f"{group}={name}" for group in groups() for name in files_of(group)} <= chosen


def test_a_default_stands_in_the_schema_alone() -> None:
    """A file of a closed section holds what it changes; the choice `default` nothing."""
    defaults = dataclasses.asdict(SECTIONS["trainer"]())
    for path in (CONF / "trainer").glob("*.yaml"):
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
        assert not [key for key in values if values[key] == defaults[key]]
    assert OmegaConf.load(CONF / "config.yaml").keys() & schema.RUN_OPTIONS == {"run_name"}


def test_a_scaling_file_states_every_argument_and_the_one_that_fits_is_chosen() -> None:
    """The scale apart, they are the defaults of the class, too."""
    for name in ("static", "Backoff", "LogMax"):
        node = composed(f"loss_scaling={name}").loss_scaling
        arguments = inspect.signature(get_class(node["_target_"])).parameters
        defaults = {key: own.default for key, own in arguments.items()}
        own = {"scale": 1024.0} if name == "static" else {"half": "float16"}
        assert {"_target_": node["_target_"], **defaults, **own} == node
    for dtype, name in {"fp32": "none", "mixed": "Backoff", "mixed_bf16": "none"}.items():
        assert scaling_name(composed(f"dtype={dtype}")) == name


WATCH = """run_name resume trainer.async_save trainer.checkpoint_every
    trainer.eval_every trainer.keep_best trainer.keep_last trainer.log_every
    trainer.max_consecutive_skips trainer.monitor trainer.parallel
    trainer.recompute trainer.requeue trainer.timeout trainer.verbosity"""
ACT = """device init_from init_from_names init_from_except seed dtype.compute dtype.half
    dtype.master_weights dtype.mode dtype.products dtype.recipes ops.allow ops.deny ops.infer
    ops.modules ops.move optimizer.groups optimizer.lr dataset.batch_size dataset.eval_batch_size
    dataset.workers trainer.accumulate trainer.channels_last trainer.clip_norm trainer.clip_value
    trainer.compile trainer.ema_decay trainer.epochs trainer.find trainer.max_steps trainer.reduce
    trainer.sync_batchnorm"""


def test_every_option_watches_or_acts_and_has_a_sentence_and_a_default_in_its_range() -> None:
    """A new option is put into one of the two lists above, by somebody who has thought of it."""
    assert set(WATCH.split()) == schema.WATCHING
    assert {*WATCH.split(), *ACT.split()} == schema.OPTIONS.keys()
    of_parts = [schema.GroupOptions, schema.JointOptions]
    for section in (*SECTIONS.values(), *of_parts):
        for option in dataclasses.fields(section):
            assert option.metadata["sentence"].endswith("."), option.name
            assert option.metadata["range"].holds(getattr(section(), option.name)), option.name
            assert not (section in of_parts and option.metadata["watches"])


def test_the_callbacks_of_every_run_only_watch() -> None:
    names = list(OmegaConf.load(CONF / "callbacks" / "default.yaml"))
    acting = [name for name in names if not only_watches(f"callbacks.{name}.x")]
    assert acting == ["loss_spikes"]  # It may skip a step.
    assert only_watches("metrics.f1.average")
    assert not only_watches("callbacks.early_stopping.patience")


def test_the_page_of_options_is_current(tmp_path: Path, capsys: Shown) -> None:
    """Mend with `python scripts/options.py`."""
    options.main([])
    options.main([f"out={tmp_path / 'page.md'}"])
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == (tmp_path / "page.md").read_text() == capsys.readouterr().out


def test_an_experiment_comes_in_two_sizes() -> None:
    whole = composed("experiment=gpt")
    assert (whole.model["depth"], whole.trainer.max_steps) == (12, None)
    small = composed("experiment=gpt", "+size=small", "dataset.context=8")
    assert (small.model["depth"], small.trainer.max_steps) == (4, 200)
    assert small.dataset["context"] == 8
