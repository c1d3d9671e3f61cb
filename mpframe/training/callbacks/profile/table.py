"""The largest costs of a profile."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mpframe.table import aligned, markdown
from mpframe.training.callbacks.profile.trace import Op

_LARGEST = 5
_HEAD = ("module", "format", "ms a step", "share", "backward")
_NUMBERS = (2, 3, 4)  # the columns of numbers


@dataclass(frozen=True)
class Costs:
    """What the ops of some steps cost.

    Attributes:
        ops: all of them.
        steps: how many steps they are of, >= 1.
    """

    ops: Sequence[Op]
    steps: int

    @property
    def milliseconds(self) -> float:
        """Of all ops, a step."""
        return sum(op.milliseconds for op in self.ops) / self.steps

    def rows(self) -> list[tuple[str, ...]]:
        """The head, the five largest costs by module and format, and the rest."""
        costs: dict[tuple[str, str], list[Op]] = defaultdict(list)
        for op in self.ops:
            costs[op.module, op.format].append(op)
        ranked = sorted(costs.items(), key=lambda cost: -_total(cost[1]))
        largest, rest = ranked[:_LARGEST], ranked[_LARGEST:]
        rows = [_HEAD, *(self._row(module, form, ops) for (module, form), ops in largest)]
        if rest:
            others = [op for _, ops in rest for op in ops]
            rows.append(self._row(f"({len(rest)} smaller)", "", others))
        return rows

    def formats(self) -> str:
        """The share of each format above 0.05 %, the largest first, and that of all casts."""
        shares: dict[str, list[Op]] = defaultdict(list)
        for op in self.ops:
            shares[op.format].append(op)
        ranked = sorted(shares.items(), key=lambda share: -_total(share[1]))
        casts = self._share([op for op in self.ops if op.is_cast])
        words = [f"{form} {self._share(ops)}" for form, ops in ranked if self._share(ops) != "0.0%"]
        return f"{', '.join(words)}; casts {casts}"

    def text(self) -> str:
        """The table for a log."""
        table = aligned(self.rows(), right=_NUMBERS)
        return f"{table}\nby format: {self.formats()}"

    def markdown(self) -> str:
        """The table for TensorBoard's text."""
        return f"{markdown(self.rows(), right=_NUMBERS)}\n\nBy format: {self.formats()}"

    def _row(self, module: str, form: str, ops: Sequence[Op]) -> tuple[str, ...]:
        total, behind = _total(ops), _total([op for op in ops if op.backward])
        of_it = f"{behind / total:.0%}" if total else ""
        return module, form, f"{total / self.steps:.3f}", self._share(ops), of_it

    def _share(self, ops: Sequence[Op]) -> str:
        whole = _total(self.ops)
        return f"{_total(ops) / whole:.1%}" if whole else "0 %"


def _total(ops: Sequence[Op]) -> float:
    return sum(op.milliseconds for op in ops)
