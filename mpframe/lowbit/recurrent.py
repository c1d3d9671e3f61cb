"""Recurrent layers and cells, step by step, with a linear layer for each of their products.

torch has each in one kernel, whose operands nobody can quantise. As in the kernels, the inputs of
all steps are multiplied at once, the hidden state step by step. All steps are in one tensor of
rows, as in a packed sequence: the sequences that go on are the first ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # `F.linear`, by a recipe
State = tuple[Tensor, ...]  # h, or h and c of an LSTM, [samples, hidden]
# Takes the gates' parts from the inputs and from the hidden state, and returns the next state.
Gates = Callable[[Tensor, Tensor, State], State]


def _lstm(inputs: Tensor, hidden: Tensor, state: State) -> State:
    i, f, g, o = (inputs + hidden).chunk(4, 1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(inputs: Tensor, hidden: Tensor, state: State) -> State:
    (r, z, n), (of_r, of_z, of_n) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    new = (n + (r + of_r).sigmoid() * of_n).tanh()
    return ((state[0] - new) * (z + of_z).sigmoid() + new,)


_GATES: dict[str, Gates] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda inputs, hidden, state: ((inputs + hidden).tanh(),),
    "rnn_relu": lambda inputs, hidden, state: ((inputs + hidden).relu(),),
}


@dataclass(frozen=True)
class _Direction:
    """One layer in one direction."""

    linear: Linear
    gates: Gates
    params: Sequence[Tensor]  # w_ih, w_hh, maybe their biases, maybe w_hr of a projection
    has_biases: bool

    def run(self, rows: Tensor, sizes: Sequence[int], state: State, back: bool) -> tuple[Any, ...]:
        """Return the output rows, and the last state of every sequence."""
        steps = torch.split(self.of_inputs(rows), list(sizes))
        outputs = []
        for step in reversed(steps) if back else steps:
            count = len(step)
            new = self.next(step, tuple(part[:count] for part in state))
            outputs.append(new[0])
            # A sequence that has ended or not begun keeps its state.
            state = tuple(torch.cat([n, part[count:]]) for n, part in zip(new, state, strict=True))
        return torch.cat(outputs[::-1] if back else outputs), state

    def of_inputs(self, rows: Tensor) -> Tensor:
        return self.linear(rows, self.params[0], self._bias(2))

    def next(self, of_inputs: Tensor, state: State) -> State:
        of_hidden = self.linear(state[0], self.params[1], self._bias(3))
        new = self.gates(of_inputs, of_hidden, state)
        if len(self.params) == (5 if self.has_biases else 3):
            new = self.linear(new[0], self.params[-1], None), *new[1:]
        return new

    def _bias(self, index: int) -> Tensor | None:
        return self.params[index] if self.has_biases else None


def _layers(
    kind: str,
    linear: Linear,
    rows: Tensor,
    sizes: Sequence[int],
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Return the output rows of the last layer, and the last states of all layers."""
    states = list(zip(*hx, strict=True)) if kind == "lstm" else [(h,) for h in hx]
    count = len(params) // len(states)
    ways = 2 if bidirectional else 1
    last: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for way in range(ways):
            weights = params[count * len(last) :][:count]
            direction = _Direction(linear, _GATES[kind], weights, has_biases)
            output, state = direction.run(rows, sizes, states[len(last)], way == 1)
            outputs.append(output)
            last.append(state)
        rows = torch.cat(outputs, 1)
        if layer < num_layers - 1:
            rows = torch.dropout(rows, dropout, train)
    return rows, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _run_packed(
    kind: str, linear: Linear, data: Tensor, batch_sizes: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, ...]:
    """Run aten's `data` form for packed sequences."""
    return _layers(kind, linear, data, batch_sizes.tolist(), *rest, **named)


def _run_padded(
    kind: str, linear: Linear, input: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, ...]:
    """Run aten's `input` form, [steps, samples, inputs] or samples first."""
    batch_first = named.pop("batch_first") if "batch_first" in named else rest[-1]
    input = input.transpose(0, 1) if batch_first else input
    sizes = [input.shape[1]] * input.shape[0]
    rows, *last = _layers(kind, linear, input.flatten(0, 1), sizes, *rest[:7], **named)
    y = rows.view(*input.shape[:2], rows.shape[1])
    return y.transpose(0, 1) if batch_first else y, *last


def layers(kind: str, linear: Linear, *args: Any, **named: Any) -> tuple[Tensor, ...]:
    """Run torch's `lstm`, `gru`, `rnn_tanh` or `rnn_relu`, in either form of its arguments."""
    is_packed = "batch_sizes" in named or not isinstance([*args, *named.values()][3], bool)
    return (_run_packed if is_packed else _run_padded)(kind, linear, *args, **named)


def cell(
    kind: str,
    linear: Linear,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Run torch's `lstm_cell` and its like."""
    biases = [] if b_ih is None or b_hh is None else [b_ih, b_hh]
    step = _Direction(linear, _GATES[kind], [w_ih, w_hh, *biases], bool(biases))
    new = step.next(step.of_inputs(input), tuple(hx) if kind == "lstm" else (hx,))
    return new if kind == "lstm" else new[0]


# By the names of torch's ops. Each takes a `Linear` before the op's arguments.
RECURRENT: dict[str, Callable[..., Any]] = {
    **{kind: partial(layers, kind) for kind in _GATES},
    **{f"{kind}_cell": partial(cell, kind) for kind in _GATES},
}
