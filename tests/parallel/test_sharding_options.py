"""What `trainer.parallel=fsdp` does not go with is refused, with the way out."""

import copy
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from torch import Tensor

from mpframe.config.command_line import check_config, compose_named, without_hydra
from mpframe.core.errors import ConfigError
from mpframe.core.objective import StepOutput
from mpframe.data.task import Task
from mpframe.parallel.launch import refuse_misfit
from mpframe.run.trainer import refuse_beside_sharding

GOES_NOT = "does not go with trainer.parallel=fsdp"
USE = {
    "trainer.compile=true": "use trainer.compile=false",
    "trainer.channels_last=true": "use trainer.channels_last=false",
    "trainer.reduce=after_backward": "use trainer.reduce=in_backward",
    "trainer.async_save=true": "use trainer.async_save=false",
    "dtype.master_weights=off": "use dtype.master_weights=on",
    "dtype.master_weights=split": "use dtype.master_weights=on",
    "dtype.products=mxfp8": "use dtype.products=none",
    "numerics.every=10": "use numerics.every=null",
    "loss_scaling.init_scale=probe": "give it a number",
}


def objective(model: object, batch: object) -> StepOutput:
    return StepOutput(Tensor())


@pytest.fixture(scope="module")
def composed() -> Any:
    return without_hydra(compose_named(["loss_scaling=LogMax", "trainer.parallel=fsdp"])[1])


def refuse(node: Any) -> None:
    task = Task(train=[], val=[], objective=objective)  # type: ignore[arg-type]
    refuse_beside_sharding(check_config(node), task)


@pytest.mark.parametrize(("option", "way_out"), USE.items())
def test_an_option_that_needs_whole_weights_is_refused(
    composed: Any, option: str, way_out: str
) -> None:
    key, _, value = option.partition("=")
    node = copy.deepcopy(composed)
    OmegaConf.update(node, key, yaml.safe_load(value))
    with pytest.raises(ConfigError) as refused:
        refuse(node)
    assert str(refused.value) == f"{option}: {GOES_NOT}; {way_out}, or trainer.parallel=ddp"


@pytest.mark.parametrize(
    ("option", "said"),
    {
        "callbacks=freeze": f"callbacks.freeze: {GOES_NOT}; use callbacks.freeze=null, or",
        "optimizer=muon_adamw": f"several optimizers or losses: {GOES_NOT}; use one of each, or",
    }.items(),
)
def test_so_is_a_part_that_does(option: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(without_hydra(compose_named([option, "trainer.parallel=fsdp"])[1]))
    assert str(refused.value) == f"{said} trainer.parallel=ddp"


def test_the_defaults_go_with_it(composed: Any) -> None:
    refuse(composed)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_it_needs_several_processes(parallel: str) -> None:
    with pytest.raises(ConfigError, match=f"^trainer.parallel={parallel}: needs several processes"):
        refuse_misfit(parallel)
