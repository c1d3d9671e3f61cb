"""The `option=value` words of a command line: parsed by Hydra, a few of them rewritten for it.

    ops.allow+=[softmax]       ->  ++ops.move.softmax=allow
    ops.deny-=[exp]            ->  ++ops.move.exp=none
    ops.modules={head:fp32}    ->  ++ops.modules={head:fp32}
    model._target_=my.Net      ->  model=own ++model._target_=my.Net   (likewise dataset, ...)
    resume=out/seed=1,lr=0.1   ->  resume='out/seed=1,lr=0.1'          if there is such a folder
    dataset.root=~/data        ->  dataset.root=/home/me/data

In a sweep over a group, options of that group are added (`++`): Hydra first composes the command
line without the sweep, and the default choice may lack them.
"""

import os
import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from mpframe.config.schema import OPEN
from mpframe.errors import ConfigError

MAPPINGS = ("ops.move", "ops.modules", "optimizer.groups")
"""Options that are mappings and hold no entry at first."""
_PATHS = ("resume", "init_from", "hydra.run.dir", "hydra.sweep.dir")
_LONGEST = 2**15  # characters; Hydra's parser takes their number squared, five seconds for a list
_MOVE = re.compile(r"^ops\.(allow|deny|infer)([+-])=\[?([\w, ]+)\]?$")


def rewritten(words: list[str]) -> list[str]:
    """The words as Hydra takes them.

    Raises:
        ConfigError: a word is not of the form option=value, or too long.
    """
    for word in words:
        if len(word) > _LONGEST:
            raise ConfigError(
                f"{word[:40]}...: has {len(word)} characters, and {_LONGEST} are allowed; put the "
                "value into a file of --config-dir"
            )
    words = [move for word in words for move in _moves(_with_quoted_path(word))]
    words = [f"++{word}" if word.startswith(MAPPINGS) else word for word in words]
    return _with_options_of_swept_groups(_with_own_targets(words))


def parsed(words: list[str]) -> list[Override]:
    """The words as Hydra understands them.

    Raises:
        ConfigError: a word is not of the form option=value.
    """
    parser = OverridesParser.create()
    overrides = []
    for word in words:
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            shown = word or "''"
            raise ConfigError(f"{shown}: not of the form option=value; {reason}") from None
        if not override.key_or_group:
            raise ConfigError(f"{word}: not of the form option=value; the option is missing")
        overrides.append(override)
    return overrides


def word_of(option: str, value: str) -> str:
    """The word that gives an option a text as its value, in quotes if Hydra needs them."""
    word = f"{option}={value}"
    try:
        plain = parsed([word])[0]
    except ConfigError:
        plain = None
    if plain is not None and not plain.is_sweep_override() and plain.value() == value:
        return word
    # A backslash is one of the text, unless a quote follows.
    escaped = re.sub(
        r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value
    )
    return f"{option}='{escaped}'"


def _with_quoted_path(word: str) -> str:
    """A path may hold `=` and commas, as the folder of a sweep's job does, or begin with `~/`."""
    option, _, value = word.partition("=")
    home = value.startswith("~/") and "," not in value
    if home or (option in _PATHS and os.path.exists(value)):
        return word_of(option, os.path.expanduser(value) if home else value)
    return word


def _moves(word: str) -> list[str]:
    """An addition to an op list, or a removal, as moves of single ops."""
    match = _MOVE.match(word)
    if match is None:
        return [word]
    name, sign, ops = match.groups()
    to = name if sign == "+" else "none"
    return [f"++ops.move.{op.strip()}={to}" for op in ops.split(",")]


def _with_own_targets(words: list[str]) -> list[str]:
    """Give a user's own class none of the arguments of the shipped choice."""
    groups = [group for group, section in OPEN.items() if not section.named]
    own = {g for g in groups for word in words if word.lstrip("+").startswith(f"{g}._target_=")}
    chosen = {g for g in groups for word in words if word.startswith(f"{g}=")}
    written = [f"{group}=own" for group in sorted(own - chosen)]
    for word in words:
        free = any(word.startswith(f"{group}.") for group in own)
        written.append(f"++{word}" if free else word)
    return written


def _with_options_of_swept_groups(words: list[str]) -> list[str]:
    overrides = parsed(words)
    swept = {o.key_or_group for o in overrides if o.is_sweep_override()}

    def free(override: Override, word: str) -> bool:
        group, dot, _ = override.key_or_group.partition(".")
        return bool(dot) and group in swept and word[0] not in "+~"

    return [
        f"++{word}" if free(override, word) else word
        for override, word in zip(overrides, words, strict=True)
    ]
