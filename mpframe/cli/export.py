"""Export a checkpoint's weights as safetensors, with plain names.

Usage: mpframe export checkpoint=PATH out=FILE.safetensors [format=...] [weights=...]

    mpframe export checkpoint=runs/2026-11-21/05-45-42 out=model.safetensors
    mpframe export checkpoint=runs/mine out=half.safetensors format=float16 weights=ema

Options:
    checkpoint=PATH       a run (its newest checkpoint) or one checkpoint; must be given
    out=FILE              must be given; a file that exists is not overwritten
    format=fp32|float16|bfloat16    default: fp32; rounded once, from the fp32 masters
    weights=trained|ema   default: trained; ema: the averages of trainer.ema_decay
"""

import sys
from pathlib import Path

from mpframe import checkpoint
from mpframe.checkpoint.export import FORMATS, Exported, converted, exists, write
from mpframe.checkpoint.saved_weights import KINDS, steps_tried, weights_of
from mpframe.cli.program import program
from mpframe.errors import ConfigError, nearest, printable, take_options

_DEFAULTS = {"checkpoint": "", "out": "", "format": "fp32", "weights": "trained"}


def main(arguments: list[str] | None = None) -> None:
    """Export the checkpoint of `checkpoint=...` into `out=...`.

    Args:
        arguments: `checkpoint=RUN_OR_CHECKPOINT`, `out=FILE.safetensors`,
            `format=fp32|float16|bfloat16`, `weights=trained|ema`; the command line if None.
    """
    with program():
        _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: list[str]) -> None:
    options = _checked(arguments)
    source, out = Path(options["checkpoint"]), Path(options["out"])
    if out.exists():
        raise exists(out)
    state = checkpoint.load(source)
    step = steps_tried(state, source)
    exported = converted(weights_of(state, options["weights"], source), options["format"])
    facts = {"format": "pt", "step": str(step), "weights": options["weights"]}
    write(out, exported, facts)
    print(printable(_text(options, step, exported)))


def _checked(arguments: list[str]) -> dict[str, str]:
    given, rest = take_options(arguments, _DEFAULTS)
    for word in rest:
        hint = nearest(word.partition("=")[0], _DEFAULTS)
        raise ConfigError(f"{word}: no such option; {hint or 'known: ' + ', '.join(_DEFAULTS)}")
    options = {**_DEFAULTS, **given}
    for name, example in (
        ("checkpoint", "runs/2026-11-21/05-45-42"),
        ("out", "model.safetensors"),
    ):
        if not options[name]:
            raise ConfigError(f"{name}: must be given, e.g. {name}={example}")
    for name, choices in (("format", tuple(FORMATS)), ("weights", KINDS)):
        if options[name] not in choices:
            hint = nearest(options[name], choices)
            raise ConfigError(
                f"{name}={options[name]}: choose {', '.join(choices)}" + f"; {hint}" * bool(hint)
            )
    return options


def _text(options: dict[str, str], step: int, exported: Exported) -> str:
    held = exported.saturated
    worst = sorted(held, key=lambda name: -held[name])
    saturation = (
        f"; {sum(held.values())} values beyond the range of {options['format']} are held at its "
        f"end ({', '.join(worst[:3])}{', ...' if len(worst) > 3 else ''})"
    )
    return (
        f"{options['out']}: {len(exported.tensors)} tensors in {options['format']}, weights "
        f"{options['weights']}, step {step}" + saturation * bool(held)
    )
