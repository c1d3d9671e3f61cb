"""Replay a run's gradients through loss scalers: a table and a picture.

Usage: mpframe simulate run=PATH [loss_scaling=NAME,...] [option=value] ...

    mpframe simulate run=runs/2026-11-21/05-45-42
    mpframe simulate run=runs/mine loss_scaling=LogMax,Backoff
    mpframe simulate run=runs/mine loss_scaling=LogMax loss_scaling.mean_decay=0.9

Options:
    run=PATH                required: a run, or its record of gradients
    loss_scaling=NAME,...   default: static,Backoff,LogMax
    loss_scaling.OPTION=VALUE, loss_scaling._target_=my_pkg.MyScaler    as for mpframe train
    dtype.half=float16|bfloat16    default: float16
    out=FILE.png            default: scaling.png in the run's folder
    --config-dir=FOLDER, --config-name=NAME    as for mpframe train
"""

from pathlib import Path

import numpy as np
import torch

from mpframe.cli.program import command, take_own
from mpframe.config.command_line import compose_named
from mpframe.config.composing import check_config
from mpframe.core.errors import ConfigError, DataError
from mpframe.core.loss_scaling import NoScaling
from mpframe.core.loss_scaling.scaler import name_of
from mpframe.files.durable import refuse_unwritable
from mpframe.files.text import say
from mpframe.lab.simulation import as_table, draw, replay
from mpframe.run.parts import build_scaler
from mpframe.tracking.records import read_amax

_OPTIONS = ("run", "loss_scaling", "out")
_ALL = ("static", "Backoff", "LogMax")


@command
def main(arguments: list[str]) -> None:
    given, options = take_own(arguments, _OPTIONS, "run")
    source = Path(given["run"])
    targeted = any(word.startswith("loss_scaling._target_=") for word in options)
    names = given.get("loss_scaling", "own" if targeted else ",".join(_ALL)).split(",")
    beside = source / "scaling.png" if source.is_dir() else source.with_suffix(".scaling.png")
    picture = Path(given.get("out") or beside)
    refuse_unwritable("out", picture.parent)
    composed = (compose_named([f"loss_scaling={name}", *options])[1] for name in names)
    configs = dict(zip(names, map(check_config, composed), strict=True))
    half = getattr(torch, next(iter(configs.values())).dtype.half)
    recorded = read_amax(source)
    amax = recorded[np.isfinite(recorded)]
    if len(amax) < len(recorded):
        # Their gradients are unknown, and any guess would decide the result.
        say(f"{len(recorded) - len(amax)} steps overflowed in the run itself and are left out")
    if not len(amax):
        raise DataError(f"{source}: every recorded step overflowed, and nothing is left to replay")
    replays = {}
    for name, config in configs.items():
        scaler = build_scaler(config)
        if isinstance(scaler, NoScaling):
            others = ", ".join(_ALL)
            raise ConfigError(f"loss_scaling={name}: has no scale to replay; choose {others}")
        replays[name_of(scaler)] = replay(amax, scaler, half)
    say(as_table(replays))
    draw(amax, replays, picture, half)
    say(f"picture: {picture}")
