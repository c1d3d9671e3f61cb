"""A run's line in the HParams table: its columns, and which of them come first."""

from pathlib import Path

import pytest
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.config.schema import Config
from mpframe.core.casting.op_lists import OpLists
from mpframe.run.description import find_varied, format_section, hparams, ops_in_words

ALWAYS = {
    "dtype", "loss_scaling", "model", "optimizer", "scheduler", "dataset", "optimizer.lr",
    "dataset.batch_size", "trainer.accumulate", "trainer.clip_norm", "trainer.ema_decay",
    "trainer.epochs", "seed",
}  # fmt: skip


def config_of(*words: str) -> Config:
    return check_config(without_hydra(compose_named(list(words))[1]))


def job(folder: Path, words: list[str], sweep: list[str] | None = None) -> DictConfig:
    """What Hydra tells a job of itself; `sweep` is the command line of its sweep."""
    if sweep is not None:
        told = {"hydra": {"overrides": {"task": sweep}}}
        OmegaConf.save(OmegaConf.create(told), folder / "multirun.yaml")
    mode = RunMode.RUN if sweep is None else RunMode.MULTIRUN
    return OmegaConf.create(
        {
            "mode": mode,
            "overrides": {"task": words},
            "runtime": {"cwd": str(folder.parent)},
            "sweep": {"dir": folder.name},
        }
    )


def test_precision_is_one_column_and_sections_hold_their_arguments() -> None:
    columns, first = hparams(config_of("dtype=mixed_bf16", "model=mlp"), "none", {})
    assert columns.keys() == ALWAYS
    assert first == []
    assert columns["dtype"] == "mixed bfloat16"
    assert columns["model"] == "mlp in_features=[1,8,8] classes=10 hidden=256 depth=2 dropout=0.0"
    assert columns["scheduler"] == "warmup_cosine warmup=0.1 min_factor=0.0"
    assert columns["optimizer.lr"] == 0.003
    assert hparams(config_of("dtype=fp32"), "none", {})[0]["dtype"] == "fp32"


def test_two_optimizers_are_one_column() -> None:
    columns, _ = hparams(config_of("model=mlp", "optimizer=muon_adamw"), "none", {})
    assert columns["optimizer"] == (
        "Muon lr=0.02 weight_decay=0.01 + AdamW lr=0.003 weight_decay=0.01"
    )
    assert format_section(None) == "none"


def test_every_job_of_a_sweep_has_the_same_columns(tmp_path: Path) -> None:
    sweep = ["model=cnn,mlp", "dtype=fp32,mixed", "trainer.epochs=3", "trainer.log_every=1,2"]
    words = ["model=mlp", "dtype=mixed", "trainer.epochs=3", "trainer.log_every=1"]
    columns, first = hparams(config_of(*words), "Backoff", find_varied(job(tmp_path, words, sweep)))
    assert columns.keys() == ALWAYS
    assert first == ["model", "dtype"]


def test_a_swept_option_has_a_column_of_its_own(tmp_path: Path) -> None:
    sweep = ["model.width=range(8,17,8)", "model.dropout=0,0.5", "optimizer.weight_decay=1,null"]
    words = ["model.width=8", "model.dropout=0.5", "optimizer.weight_decay=1"]
    told = find_varied(job(tmp_path, words, sweep))
    columns, first = hparams(config_of(*words), "Backoff", told)
    assert first == ["model.width", "model.dropout", "optimizer.weight_decay"]
    assert (columns["model.width"], columns["model.dropout"]) == (8, 0.5)
    assert columns["optimizer.weight_decay"] == "1"  # null is no number, so no value is one


def test_the_jobs_of_a_glob_have_their_choice(tmp_path: Path) -> None:
    words = ["dtype=amp_bf16"]
    told = find_varied(job(tmp_path, words, ["dtype=glob(*bf16)"]))
    columns, first = hparams(config_of(*words), "none", told)
    assert (first, columns["dtype"]) == (["dtype"], "amp bfloat16")


def test_what_a_searcher_draws_comes_first(tmp_path: Path) -> None:
    sweep = ["optimizer.lr=tag(log,interval(1e-4,1e-1))", "model=mlp"]
    words = ["optimizer.lr=0.02", "model=mlp", "model.depth=2"]
    told = find_varied(job(tmp_path, words, sweep))
    columns, first = hparams(config_of(*words), "Backoff", told)
    assert first == ["optimizer.lr", "model.depth"]
    assert (columns["optimizer.lr"], columns["model.depth"]) == (0.02, 2)


def test_of_a_single_run_the_options_of_its_command_line_come_first(tmp_path: Path) -> None:
    words = ["dtype=amp", "dtype.half=bfloat16", "++ops.move.softmax=allow", "run_name=a", "~x"]
    columns, first = hparams(config_of(*words[:4]), "none", find_varied(job(tmp_path, words)))
    assert first == ["dtype", "ops.move.softmax"]
    assert (columns["dtype"], columns["ops.move.softmax"]) == ("amp bfloat16", "allow")
    assert find_varied(None) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "`default`"),
        (
            ["ops.allow+=[softmax]", "ops.deny-=[exp]", "ops.modules={head:fp32}"],
            "`default`, moved `exp` to none, `softmax` to allow, pinned `head` to fp32",
        ),
    ],
)
def test_lists_of_ops_are_a_file_and_what_was_moved(words: list[str], said: str) -> None:
    ops = config_of(*words).ops
    assert ops_in_words(OpLists.from_mapping(vars(ops))) == said
