"""The search finds planted fragile modules, exactly those; what it writes is what `ops=` takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

import mpframe.lowbit  # noqa: F401  # Recipes are named.
from mpframe import OpLists, Precision, Trainer
from mpframe.cli.commands.search import main
from mpframe.core.callback import Batch
from mpframe.core.errors import ConfigError
from mpframe.core.objective import Objective, supervised
from mpframe.lab.search import Pins, Search, SearchResult
from mpframe.training.objectives import model_loss


class Hot(nn.Linear):
    """Its product is a million times too large for half, and is divided again."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 1e6, None) / 1e6


class Cold(nn.Linear):
    """Its inputs are made so small that half has nothing left of them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * 1e-9, self.weight, None) * 1e9 + self.bias


class HotBackward(nn.Linear):
    """Harmless forward; on the way back its gradient is a million times larger for a while."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        y.register_hook(lambda gradient: (gradient * 1e7) / 1e7)
        return y


class Residual(nn.Module):
    """Blocks with and without faults, added to their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.first = HotBackward(16, 16)
        self.second = nn.Linear(16, 16)
        self.third = Hot(16, 16)
        self.norm = nn.LayerNorm(16)
        self.fourth = Cold(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for block in (self.first, self.second, self.third, self.fourth):
            x = x + torch.tanh(block(self.norm(x)))
        return self.head(x)


def one_fault() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), Hot(32, 32), nn.Tanh(), nn.Linear(32, 4))


def two_faults() -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
    rest = [Cold(32, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), Hot(16, 16)]
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), conv, nn.Flatten(), *rest, nn.Linear(16, 4))


def healthy() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


PLANTED = {
    "none": (healthy, ()),
    "one": (one_fault, ("2",)),
    "two": (two_faults, ("3", "7")),
    "three": (Residual, ("first", "third", "fourth")),
}


def trainer_of(
    model: nn.Module, precision: Precision, objective: Objective | None = None
) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, masters = precision.prepare(model, optimizer)
    return Trainer(model, masters, objective or supervised(nn.CrossEntropyLoss()), precision)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator))
        for _ in range(count)
    ]


def found_in(name: str, mode: str, half: str = "float16", target: float = 0.1) -> SearchResult:
    def make(pins: Pins, alone: str | None) -> Trainer:
        torch.manual_seed(0)
        lists = OpLists.named()
        moved = {op: "deny" for op in lists.allow if alone not in (None, op)}
        ops = OpLists(lists.allow, lists.deny, lists.infer, modules=dict(pins)).moved(moved)
        return trainer_of(PLANTED[name][0](), Precision(mode, half, ops=ops))

    torch.manual_seed(0)
    reference = trainer_of(PLANTED[name][0](), Precision("fp32", half))
    return Search(reference, make, batches(2), target).run(["linear"])


@pytest.mark.parametrize(("name", "mode"), [("one", "amp"), ("two", "mixed"), ("three", "mixed")])
def test_exactly_the_planted_modules_are_found(name: str, mode: str) -> None:
    found = found_in(name, mode)
    assert found.pinned == PLANTED[name][1]
    assert found.reached.worst <= 0.1 < found.all_half.worst
    worst = {sensitivity.name for sensitivity in found.modules[: len(found.pinned)]}
    assert worst == set(PLANTED[name][1])
    assert found.ops[0].error.worst > 0.1


def test_a_model_that_returns_its_loss_is_searched_as_one_beside_a_loss() -> None:
    """Dict batches: the same errors, number by number."""

    class OwnLoss(nn.Sequential):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": nn.functional.cross_entropy(super().forward(x), labels)}

    def searched(kind: type[nn.Module], objective: Objective, given: list[Any]) -> SearchResult:
        def make(pins: Pins, alone: str | None = None, mode: str = "mixed") -> Trainer:
            torch.manual_seed(0)
            ops = replace(OpLists.named(), modules=dict(pins))
            model = kind(*healthy())
            return trainer_of(model, Precision(mode, ops=ops), objective)

        return Search(make({}, mode="fp32"), make, given, 1e-4).run()

    plain = searched(nn.Sequential, supervised(nn.CrossEntropyLoss()), batches(2))
    keyed = [{"x": inputs, "labels": targets} for inputs, targets in batches(2)]
    assert searched(OwnLoss, model_loss, keyed) == plain


def test_a_loose_target_pins_nothing_and_the_tightest_all_products() -> None:
    assert found_in("none", "mixed").pinned == ()
    found = found_in("none", "mixed", target=1e-12)
    # With every product in fp32 no bit differs from fp32.
    assert (found.pinned, found.reached.worst) == (("0", "2"), 0.0)


class Spiky(nn.Linear):
    """Every eighth input is huge, and its weight is 0: half loses nothing, a shared scale all."""

    def forward(self, x: Tensor) -> Tensor:
        spike = torch.arange(x.shape[-1]) % 8 == 0
        return F.linear(torch.where(spike, 1e7, x), self.weight.masked_fill(spike, 0.0), self.bias)


def spiky() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 64), nn.Tanh(), Spiky(64, 64), nn.Tanh()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def test_exactly_the_planted_products_are_found() -> None:
    def make(pins: Pins, alone: str | None = None, products: str = "nvfp4") -> Trainer:
        torch.manual_seed(0)
        ops = replace(OpLists.named(), modules=dict(pins))
        return trainer_of(spiky(), Precision("mixed", "bfloat16", ops=ops, products=products))

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(64, 64, generator=generator), torch.arange(64) % 16
    candidates = ["1", "3", "5", "7"]
    reference = make({}, products="none")
    found = Search(reference, make, [data], 0.6, pin="none", modules=candidates).run()
    assert found.pinned == ("3",)
    assert found.reached.worst <= 0.6 < found.all_half.worst
    # With all products in half no bit differs from the run without a recipe.
    tight = Search(reference, make, [data], 1e-12, pin="none", modules=candidates).run()
    assert (tight.pinned, tight.reached.worst) == (tuple(candidates), 0.0)


def test_bfloat16_has_the_range_and_needs_no_pin_for_the_hot_one() -> None:
    found = found_in("one", "mixed", "bfloat16", target=0.3)
    assert found.pinned == ()


def test_the_command_writes_lists_that_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model._target_=test_search.one_fault_of_digits", "dtype=mixed", "device=cpu"]
    words += ["callbacks.progress_bar=null", f"out={tmp_path}"]
    main([*words, "batches=1", "prove=20", "seeds=2"])
    printed = capsys.readouterr().out
    assert "found: 1 of 6 modules in fp32" in printed
    assert "    ops.modules.3=fp32\n" in printed
    lists = OpLists.from_mapping(yaml.safe_load((tmp_path / "ops.yaml").read_text()))
    assert dict(lists.modules) == {"3": "fp32"}
    proof = printed.split("## Proof")[1]
    runs = [line.split(" | ")[0] for line in proof.splitlines() if line.startswith("| ")]
    assert runs[-3:] == ["| fp32", "| found", "| all in half"]
    assert "| all in half | 2 of 2 diverged | 2 of 2 diverged |" in proof
    assert "within the range of fp32's seeds" in proof
    assert (tmp_path / "search.md").read_text().strip() in printed


def test_the_command_writes_which_products_stay_in_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model._target_=test_search.spiky", "dtype=mixed_bf16", "dtype/products=nvfp4"]
    words += ["device=cpu", "callbacks.progress_bar=null"]
    main([*words, f"out={tmp_path}", "target=1e-9", "batches=1", "prove=1", "seeds=1"])
    printed = capsys.readouterr().out
    assert "# What must stay in half (mixed, nvfp4)" in printed
    assert "found: 4 of 4 modules in half, gradients 0, loss 0\n" in printed
    assert "    ops.modules.1=none ops.modules.3=none ops.modules.5=none" in printed
    assert "## Modules, each alone in nvfp4, the worst first" in printed
    assert "## Ops" not in printed
    proof = printed.split("## Proof")[1]
    runs = [line.split(" | ")[0] for line in proof.splitlines() if line.startswith("| ")]
    assert runs[-3:] == ["| half", "| found", "| all in nvfp4"]
    lists = OpLists.from_mapping(yaml.safe_load((tmp_path / "ops.yaml").read_text()))
    assert dict(lists.modules) == dict.fromkeys("1357", "none")


def one_fault_of_digits() -> nn.Module:
    """For the command: a model by name."""
    head = [nn.Flatten(), nn.Linear(64, 32), nn.Tanh()]
    return nn.Sequential(*head, Hot(32, 32), nn.Tanh(), nn.Linear(32, 10))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["dtype=fp32"], "dtype.mode=fp32: nothing is in half; choose dtype=mixed or dtype=amp"),
        (["target=0"], "target=0: must be a number > 0"),
        (["batches=none"], "batches=none: must be a number > 0"),
        (["prove=-1"], "prove=-1: must be a number >= 0"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ConfigError)):
        main(words)
    assert line in capsys.readouterr().err
