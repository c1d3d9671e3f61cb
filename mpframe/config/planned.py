"""Resolvers of a configuration: `${size:768,128}`, and `${plan:NAME}` for a run's length.

With `+size=small` each `${size:FULL,SMALL}` of an experiment is its second value.

A schedule is made for a number of steps, whatever its argument for it is called:

    T_max: ${plan:total_steps}                 planned optimizer steps
    num_warmup_steps: ${plan:total_steps,0.1}  a tenth of them, rounded down
    epochs: ${plan:epochs}                     passes over the data; the last may be incomplete
    steps_per_epoch: ${plan:steps_per_epoch}

A resolved configuration still contains the `${plan:...}`. `fill_in` puts the numbers in when the
schedule is made, because they are known only once the dataset is loaded.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from omegaconf import OmegaConf

NAMES = ("total_steps", "epochs", "steps_per_epoch")
_WORDS = re.compile(r"\$\{plan:(\w+)(?:,([\d.e+-]+))?\}")


def _keep_plan(name: str, share: Any = None) -> str:
    """Return the words unresolved, if they are allowed."""
    if name not in NAMES:
        raise ValueError(f"the plan has no {name}: choose {', '.join(NAMES)}")
    if share is None:
        return f"${{plan:{name}}}"
    if isinstance(share, str) or not 0 <= share <= 1:
        raise ValueError(f"a share of the plan is a number from 0 to 1, not {share}")
    return f"${{plan:{name},{share}}}"


def _choose_size(full: Any, small: Any, *, _root_: Any) -> Any:
    return small if OmegaConf.select(_root_, "size") == "small" else full


OmegaConf.register_new_resolver("plan", _keep_plan, replace=True)
OmegaConf.register_new_resolver("size", _choose_size, replace=True)


def fill_in(node: Any, plan: Mapping[str, int]) -> Any:
    """Return `node` with the numbers of `plan` in place of its `${plan:...}`."""
    if isinstance(node, Mapping):
        return {key: fill_in(value, plan) for key, value in node.items()}
    if isinstance(node, list):
        return [fill_in(value, plan) for value in node]
    words = _WORDS.fullmatch(node) if isinstance(node, str) else None
    if words is None:
        return node
    name, share = words.groups()
    # As a float, 0.29 * 100 is 28.999999999999996.
    return plan[name] if share is None else int(plan[name] * Fraction(share))
