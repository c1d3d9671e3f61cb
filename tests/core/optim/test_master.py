"""One master for one weight: writes by others are adopted, optimizers share it, frozen ones too."""

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES, same_bits

from mpframe import MasterWeights, Precision, Static
from mpframe.core.errors import ConfigError
from mpframe.core.optim import masters as core_masters
from mpframe.core.optim.masters import _SUMMED as LARGE
from mpframe.training.callbacks.ema import Ema


def sgd(params: Any, lr: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=lr)


def linear(half: str = "float16", size: int = 4) -> tuple[nn.Linear, MasterWeights]:
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    return Precision("mixed", half).prepare(model, sgd(model.parameters()))  # type: ignore[return-value]


def step(optimizer: Any, *weights: Tensor, value: float = 0.25) -> None:
    """One step on a gradient of `value` everywhere: SGD at lr 0.5 moves by half of it."""
    for weight in weights:
        weight.grad = torch.full_like(weight, value)
    optimizer.step()


def load(model: nn.Linear) -> None:
    model.load_state_dict({name: torch.ones_like(t) for name, t in model.state_dict().items()})


def data(model: nn.Linear, change: Callable[[Tensor], Any]) -> None:
    model.weight.data = change(model.weight.data)


WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "load_state_dict": load,
    "copy_": lambda model: model.weight.detach().copy_(torch.ones_like(model.weight)),
    "data =": lambda model: data(model, torch.ones_like),
    "data.clamp_": lambda model: model.weight.data.clamp_(-0.1, 0.1),
    "data.neg_": lambda model: model.weight.data.neg_(),
    "data rows": lambda model: model.weight.data[:2].copy_(model.weight.data[:2].flip(0)),
    "init": lambda model: nn.init.constant_(model.weight, 3.0),
    "max_norm": lambda model: nn.functional.embedding(
        torch.arange(len(model.weight)), model.weight, max_norm=0.5
    ),
}


class TestWrites:
    """What others write into a half weight is where its next update starts."""

    @pytest.mark.parametrize(
        ("name", "size", "half"),
        [
            *zip(WRITES, itertools.cycle([4, 257, 5, 256]), itertools.cycle(HALVES)),
            *((f"data{w}", s, "float16") for w in (".neg_", " rows") for s in (5, 256, 257)),
        ],
    )
    def test_a_write_is_adopted(self, name: str, size: int, half: str) -> None:
        """Small and large ones, of whole and odd rows."""
        write, (model, optimizer) = WRITES[name], linear(half, size)
        step(optimizer, model.weight)
        before = model.weight.detach().clone()
        write(model)
        written = model.weight.detach().clone()
        assert not torch.equal(written, before)
        step(optimizer, model.weight, value=0.0)
        assert same_bits([model.weight], [written])
        step(optimizer, model.weight)
        assert torch.equal(model.weight, (optimizer.master_of(model.weight)).to(written.dtype))
        changed = written != before
        moved = written.float() - 0.125
        assert torch.equal(optimizer.master_of(model.weight)[changed], moved[changed])

    @pytest.mark.parametrize("name", ["load_state_dict", "data =", "max_norm"])
    def test_without_a_look_at_the_values(self, name: str, monkeypatch: Any) -> None:
        """As on an accelerator: the version counter and the address tell of the other writes."""
        monkeypatch.setattr(core_masters, "_values_count", lambda _: False)
        model, optimizer = linear()
        for _ in range(2):
            WRITES[name](model)
            written = model.weight.detach().clone()
            step(optimizer, model.weight, value=0.0)
            assert same_bits([model.weight], [written])

    @pytest.mark.parametrize("looks", [True, False])
    def test_new_data_at_the_old_address(self, looks: bool, monkeypatch: Any) -> None:
        """An allocator gives freed memory again: the master holds what it has seen."""
        if not looks:
            monkeypatch.setattr(core_masters, "_values_count", lambda _: False)
        model, optimizer = linear()
        for value in (1.0, 2.0, 3.0):
            model.weight.data = torch.full((4, 4), 7.0, dtype=torch.float16)
            model.weight.data = torch.full((4, 4), value, dtype=torch.float16)
            step(optimizer, model.weight, value=0.0)
            assert model.weight.unique().tolist() == [value]

    def test_elements_that_nobody_wrote_keep_their_fp32_digits(self) -> None:
        model, optimizer = linear()
        master = optimizer.master_of(model.weight).detach().clone()
        assert not torch.equal(master, model.weight.float())
        with torch.no_grad():
            model.weight[0].fill_(2.0)
        master[0] = 2.0
        assert same_bits([optimizer.master_of(model.weight)], [master])

    @pytest.mark.parametrize("way", ["copy_", "data"])
    def test_an_exchange_that_is_undone_changes_nothing(self, way: str) -> None:
        """As of averaged weights for a validation."""
        model, optimizer = linear()
        master = optimizer.master_of(model.weight).detach().clone()
        kept = model.weight.detach().clone() if way == "copy_" else model.weight.data
        other = torch.zeros_like(kept)
        for values in (other, kept):
            if way == "data":
                model.weight.data = values
            else:
                model.weight.detach().copy_(values)
        assert same_bits([optimizer.master_of(model.weight)], [master])
        step(optimizer, model.weight)
        assert same_bits([optimizer.master_of(model.weight)], [master - 0.125])

    def test_widening_the_model_keeps_the_masters(self) -> None:
        """`model.float()` writes what the weights held: nothing new."""
        model, optimizer = linear()
        master = optimizer.master_of(model.weight).detach().clone()
        model.float()
        assert same_bits([optimizer.master_of(model.weight)], [master])

    def test_written_between_micro_batches(self) -> None:
        model, optimizer = linear()
        model.weight.grad = torch.full_like(model.weight, 0.25)
        optimizer.accumulate()
        model.weight.data.fill_(1.0)
        optimizer.step()
        assert torch.equal(model.weight, torch.full((4, 4), 0.875, dtype=torch.float16))

    def test_a_skipped_step_leaves_the_write_for_the_next(self) -> None:
        model, optimizer = linear()
        model.weight.data.fill_(1.0)
        step(optimizer, model.weight, value=float("inf"))
        assert torch.equal(model.weight, torch.ones(4, 4, dtype=torch.float16))
        step(optimizer, model.weight)
        assert torch.equal(optimizer.master_of(model.weight), torch.full((4, 4), 0.875))

    @pytest.mark.parametrize("skip", [False, True])
    def test_with_the_verdict_on_the_device(self, skip: bool) -> None:
        model = nn.Linear(4, 4)
        fused = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
        model, optimizer = Precision("mixed").prepare(model, fused)  # type: ignore[assignment]
        step(optimizer, model.weight)
        model.weight.data.fill_(1.0)
        step(optimizer, model.weight, value=float("inf") if skip else 0.25)
        assert model.weight.unique().tolist() == [1.0 if skip else 0.875]

    def test_in_what_is_saved(self) -> None:
        model, optimizer = linear()
        model.weight.data.fill_(1.0)
        saved = optimizer.state_dict()["masters"][0]
        assert same_bits([saved], [torch.ones(4, 4)])
        model.weight.data.fill_(2.0)
        assert torch.equal(optimizer.masters_by_name(model)["weight"], torch.full((4, 4), 2.0))

    def test_a_state_with_some_masters_leaves_the_write(self) -> None:
        """As of a run that kept the bias in fp32."""
        model, optimizer = linear()
        state = optimizer.state_dict()
        state["masters"][1] = None
        model.bias.data.fill_(1.0)
        optimizer.load_state_dict(state)
        assert same_bits(
            [model.bias, optimizer.master_of(model.bias)], [torch.ones(4).half(), torch.ones(4)]
        )

    def test_loaded_masters_are_not_taken_for_a_write(self) -> None:
        model, optimizer = linear()
        fine = {"weight": torch.full((4, 4), 1 + 2.0**-20), "bias": torch.zeros(4)}
        optimizer.load_masters(model, fine)
        step(optimizer, model.weight, value=0.0)
        assert same_bits([optimizer.master_of(model.weight)], [fine["weight"]])

    def test_in_the_average(self) -> None:
        model, optimizer = linear()
        ema = Ema({model.weight: optimizer.master_of(model.weight)}, 0.0625)
        model.weight.data.fill_(1.0)
        step(optimizer, model.weight)
        before = ema.by_name(model)["weight"]
        ema.update()
        expected = torch.lerp(before, torch.full((4, 4), 0.875), 1 - 0.0625)
        assert torch.equal(ema.by_name(model)["weight"], expected)
        master = optimizer.master_of(model.weight).detach().clone()
        with ema.apply():
            pass
        step(optimizer, model.weight, value=0.0)
        assert same_bits([optimizer.master_of(model.weight)], [master])

    def test_without_masters_there_is_nothing_to_adopt(self) -> None:
        model, precision = nn.Linear(4, 4), Precision("mixed", master_weights=False)
        _, optimizer = precision.prepare(model, sgd(model.parameters()))
        model.weight.data.fill_(1.0)
        step(optimizer, model.weight)
        assert optimizer.master_of(model.weight) is model.weight
        assert model.weight.unique().tolist() == [0.875]

    @pytest.mark.parametrize("odd", ["transposed", "offset", "empty"])
    def test_weights_of_any_layout(self, odd: str) -> None:
        values = {
            "transposed": torch.zeros(512, 256, dtype=torch.float16).t(),
            "offset": torch.zeros(8 * LARGE + 1, dtype=torch.float16)[1:].view(2, -1),
            "empty": torch.zeros(0, 3, dtype=torch.float16),
        }
        weight = nn.Parameter(values[odd])
        optimizer = MasterWeights(sgd([weight]))
        weight.data.fill_(1.0)
        step(optimizer, weight)
        assert torch.equal(weight, torch.full_like(weight, 0.875))


class TestSharing:
    """However many optimizers a weight has, it has one master."""

    def test_a_second_prepare_goes_on_from_the_masters(self) -> None:
        """2^-13 is no update that a half weight of 1 can take; 2 optimizers make one of them."""
        model = nn.Linear(4, 4)
        nn.init.ones_(model.weight)
        for _ in range(2):
            gc.collect()  # The first optimizer is gone when the second is made.
            precision = Precision("mixed", "bfloat16")
            optimizer = precision.prepare(model, sgd(model.parameters(), 2.0**-13))[1]
            step(optimizer, model.weight, value=1.0)
        expected = torch.full((4, 4), 1 - 2.0**-12)
        assert same_bits([optimizer.master_of(model.weight)], [expected])

    def test_a_weight_that_was_fp32_in_between_starts_from_that(self) -> None:
        model, first = linear()
        model.float()
        nn.init.constant_(model.weight, 1 + 2.0**-20)
        again = Precision("mixed").prepare(model, sgd(model.parameters()))[1]
        assert torch.equal(again.master_of(model.weight), torch.full((4, 4), 1 + 2.0**-20))
        assert first.master_of(model.weight) is again.master_of(model.weight)

    @pytest.mark.parametrize("then", ["fp32", "amp", "mixed"])
    def test_another_mode_goes_on_from_the_masters(self, then: str) -> None:
        """2^-20 is below what either half format holds beside 1, and 2^-40 below float16."""
        model, first = linear("bfloat16")
        exact = torch.full((4, 4), 1 + 2.0**-20)
        exact[0] = 2.0**-40
        first.load_masters(model, {"weight": exact, "bias": torch.ones(4)})
        again = Precision(then, "float16").prepare(model, sgd(model.parameters()))[1]
        assert same_bits([again.master_of(model.weight)], [exact])
        assert same_bits([model.weight], [exact.to(model.weight.dtype)])
        assert same_bits([first.master_of(model.weight)], [exact])

    def test_a_master_lives_as_long_as_its_weight(self) -> None:
        from mpframe.core.optim.masters import _MASTERS

        gc.collect()
        before = len(_MASTERS)
        model, optimizer = linear()
        assert len(_MASTERS) == before + 2
        del model, optimizer
        gc.collect()
        assert len(_MASTERS) == before


class TestFrozen:
    """A weight that no optimizer has yet keeps its fp32 value for the one that will."""

    @staticmethod
    def prepared(**options: Any) -> tuple[nn.Sequential, MasterWeights, Tensor]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        before = model[0].weight.detach().clone()
        _, optimizer = Precision("mixed").prepare(model, sgd(model[1].parameters()), **options)
        return model, optimizer, before

    def test_a_group_that_is_added_to_the_wrapped_optimizer(self) -> None:
        model, optimizer, before = self.prepared()
        model[0].requires_grad_(True)
        optimizer.optimizer.add_param_group({"params": list(model[0].parameters())})
        assert optimizer.param_groups[1]["params"][0] is model[0].weight
        model[0].weight.grad = torch.full_like(model[0].weight, 2.0)
        optimizer.step(Static(8.0))
        assert same_bits([optimizer.master_of(model[0].weight)], [before - 0.125])
        assert same_bits([model[0].weight], [(before - 0.125).half()])

    def test_its_fp32_value_is_saved(self) -> None:
        model, optimizer, before = self.prepared()
        assert same_bits([optimizer.masters_by_name(model)["0.weight"]], [before])
        other, loading, _ = self.prepared()
        loading.load_masters(other, optimizer.masters_by_name(model))
        assert same_bits([loading.masters_by_name(other)["0.weight"]], [before])
        assert same_bits([other[0].weight], [before.half()])

    def test_it_can_be_given_up(self) -> None:
        model, optimizer, before = self.prepared(keep_frozen=False)
        assert optimizer.masters_by_name(model).keys() == {"1.weight", "1.bias"}
        optimizer.add_param_group({"params": [model[0].weight]})
        assert same_bits([optimizer.master_of(model[0].weight)], [before.half().float()])

    def test_a_frozen_weight_of_the_optimizer_is_not_given_up(self) -> None:
        model = nn.Linear(4, 4).requires_grad_(False)
        before = model.weight.detach().clone()
        _, optimizer = Precision("mixed").prepare(model, sgd([model.weight]), keep_frozen=False)
        assert same_bits([optimizer.master_of(model.weight)], [before])


def test_sparse_half_weights_are_refused() -> None:
    weight = nn.Parameter(torch.eye(2, dtype=torch.float16).to_sparse())
    with pytest.raises(ConfigError) as error:
        MasterWeights(sgd([weight]))
    assert str(error.value) == (
        "optimizer: parameter 0 of shape (2, 2) is sparse and torch.float16; a half weight is "
        "dense: store it in fp32 (ops.modules=...:fp32), or dense"
    )


def test_a_scale_is_taken_out_of_shared_steps_too() -> None:
    model, first = linear()
    second = Precision("mixed").prepare(model, sgd(model.parameters()))[1]
    assert first.master_of(model.weight) is second.master_of(model.weight)
    start = first.master_of(model.weight).detach().clone()
    for optimizer in (first, second):
        model.weight.grad = torch.full_like(model.weight, 2.0)
        optimizer.step(Static(8.0))
    assert same_bits([first.master_of(model.weight)], [start - 0.125 - 0.125])
