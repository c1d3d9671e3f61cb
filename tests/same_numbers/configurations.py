"""The short runs whose numbers two checkouts must share: modes x scalers x windows x the rest.

Every run takes a dozen steps on the handwritten digits, or on data that it generates. Backoff
begins high, so that its runs skip steps and drop micro-batches before they find their scale.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

_SHORT = (
    *("trainer.max_steps=12", "trainer.eval_every=6", "trainer.checkpoint_every=6"),
    *("trainer.log_every=1", "callbacks.progress_bar=null", "callbacks.autopsy=null"),
)
_DIGITS = ("model=mlp", "model.hidden=32", "dataset.batch_size=32")
_MODES = {
    "fp32": "dtype=fp32",
    "mixed float16": "dtype=mixed",
    "mixed bfloat16": "dtype=mixed_bf16",
    "amp float16": "dtype=amp",
    "amp bfloat16": "dtype=amp_bf16",
}
_SCALERS = {
    "no scaling": ("loss_scaling=none",),
    "Backoff": ("loss_scaling=Backoff", "loss_scaling.init_scale=16777216"),
    "LogMax": ("loss_scaling=LogMax", "loss_scaling.init_scale=16777216"),
    "static": ("loss_scaling=static", "loss_scaling.scale=4096"),
}
_WINDOWS = {"one batch": (), "windows of 3": ("trainer.accumulate=3",)}
_CLIPPING = {"unclipped": (), "clipped": ("trainer.clip_norm=0.5",)}
_OPTIMIZERS = {
    "SGD": ("optimizer=sgd", "optimizer.momentum=0.9", "scheduler=poly"),
    "fused AdamW": ("+optimizer.fused=true",),
    "Muon": ("optimizer=muon_adamw",),
    "groups": ("optimizer.groups={biases: {ndim: 1, weight_decay: 0, lr: 0.006}}",),
    "LARC": ("optimizer=sgd", "callbacks=larc"),
}
_BATCH_NORM = ("model=cnn", "model.width=4")
_MODELS = {
    "cnn": _BATCH_NORM,
    "cnn recomputed": (*_BATCH_NORM, "trainer.recompute=['*']"),
    "cnn averaged": (*_BATCH_NORM, "trainer.ema_decay=0.9"),
    "gpt": ("experiment=gpt", "+size=small", "model.depth=1", "model.heads=2", "model.width=16",
            "dataset.batch_size=4", "dataset.context=16", "dataset.eval_windows=8"),
    "lstm": ("experiment=speech_lstm", "+size=small", "dataset.train=128", "model.hidden=8"),
    "unet": ("experiment=shapes_unet", "+size=small", "dataset.batch_size=4", "dataset.images=80",
             "dataset.image_size=16", "model.width=4"),
    "gan": ("experiment=digits_gan", "dataset.batch_size=32"),
    "gan together": ("experiment=digits_gan", "dataset.batch_size=32", "optimizer.skip=all"),
}  # fmt: skip
_RANKS = {
    "ddp": (),
    "ddp after the backward pass": ("trainer.reduce=after_backward",),
    "fsdp": ("trainer.parallel=fsdp",),
}


class Configuration(NamedTuple):
    name: str  # what tells it from the others
    options: tuple[str, ...]  # of the command line
    ranks: int = 1  # processes that train together
    resumed: bool = False  # stopped after half of its steps, and resumed


def configurations() -> Iterator[Configuration]:
    for mode, scaler, window, clipping in product(_MODES, _SCALERS, _WINDOWS, _CLIPPING):
        if scaler == "no scaling" or mode.endswith(" float16"):
            options = (*_SCALERS[scaler], *_WINDOWS[window], *_CLIPPING[clipping])
            yield _of(f"{mode}, {scaler}, {window}, {clipping}", mode, *_DIGITS, *options)
    digits = {name: (*_DIGITS, *options) for name, options in _OPTIMIZERS.items()}
    for mode in ("mixed float16", "amp bfloat16"):
        for name, options in {**digits, **_MODELS}.items():
            yield _of(f"{mode}, {name}", mode, *options)
    for recipe in ("fp8_tensorwise", "fp8_rows", "mxfp8", "mxfp4", "nvfp4"):
        options = (*_DIGITS, f"dtype/products={recipe}")
        yield _of(f"mixed bfloat16, {recipe}", "mixed bfloat16", *options)
    yield from _of_ranks_and_resumed()


def _of_ranks_and_resumed() -> Iterator[Configuration]:
    for mode in _MODES:
        searching = _SCALERS["Backoff"] if mode.endswith(" float16") else ()
        run = (*_DIGITS, *searching)
        for kind, options in _RANKS.items():
            yield _of(f"{mode}, {kind}", mode, *run, *options, ranks=2)
        yield _of(f"{mode}, resumed", mode, *run, resumed=True)
        options = (*_BATCH_NORM, *searching, "trainer.ema_decay=0.9", "trainer.accumulate=2")
        yield _of(f"{mode}, averaged, resumed", mode, *options, resumed=True)
        if mode == "mixed float16":
            yield _of(f"{mode}, ddp, resumed", mode, *run, ranks=2, resumed=True)


def _of(name: str, mode: str, *options: str, **rest: Any) -> Configuration:
    return Configuration(name, (*options, _MODES[mode], *_SHORT), **rest)
