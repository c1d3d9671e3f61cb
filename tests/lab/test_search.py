"""The search finds planted fragile modules, exactly those; what it writes is what `ops=` takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fixtures import Shown
from prepared import prepared
from torch import Tensor, nn
from torch.nn import functional as F

import mpframe.lowbit  # noqa: F401  # Recipes are named.
from mpframe import OpLists, Precision, Trainer
from mpframe.cli.commands.search import main
from mpframe.core.errors import ConfigError
from mpframe.lab.search import Pins, RelativeError, Search, SearchResult


class Scaled(nn.Linear):
    """Its product with scaled inputs, scaled back; half has no room for it."""

    scale = 1e6

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.scale, self.weight, None) / self.scale + self.bias


class Cold(Scaled):
    scale = 1e-9


def one_fault(inputs: int = 8, classes: int = 4) -> nn.Module:
    ends = nn.Linear(inputs, 32), nn.Linear(32, classes)
    return nn.Sequential(nn.Flatten(), ends[0], nn.Tanh(), Scaled(32, 32), nn.Tanh(), ends[1])


def two_faults() -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
    rest = [Cold(32, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), Scaled(16, 16)]
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), conv, nn.Flatten(), *rest, nn.Linear(16, 4))


def trainer_of(model: nn.Module, precision: Precision) -> Trainer:
    return prepared(model, nn.CrossEntropyLoss(), precision)


def found_in(planted: Any, mode: str, half: str = "float16", target: float = 0.1) -> SearchResult:
    def make(pins: Pins, alone: str | None) -> Trainer:
        torch.manual_seed(0)
        lists = OpLists.named()
        moved = {op: "deny" for op in lists.allow if alone not in (None, op)}
        ops = OpLists(lists.allow, lists.deny, lists.infer, modules=dict(pins)).moved(moved)
        return trainer_of(planted(), Precision(mode, half, ops=ops))

    torch.manual_seed(0)
    reference = trainer_of(planted(), Precision("fp32", half))
    torch.manual_seed(1)
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(2)]
    return Search(reference, make, batches, target).run(["linear"])


@pytest.mark.parametrize(
    ("planted", "mode", "faults"), [(one_fault, "amp", ["3"]), (two_faults, "mixed", ["3", "7"])]
)
def test_exactly_the_planted_modules_are_found(planted: Any, mode: str, faults: list[str]) -> None:
    found = found_in(planted, mode)
    assert list(found.pinned) == faults
    assert found.reached.worst <= 0.1 < found.all_half.worst
    assert {own.name for own in found.modules[: len(faults)]} == {*faults}
    assert found.ops[0].error.worst > 0.1


def test_what_is_pinned_depends_on_the_target_and_the_format() -> None:
    def healthy() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    assert found_in(healthy, "mixed").pinned == ()
    found = found_in(healthy, "mixed", target=1e-12)
    # With every product in fp32 no bit differs from fp32.
    assert (found.pinned, found.reached.worst) == (("0", "2"), 0.0)
    assert found_in(one_fault, "mixed", "bfloat16", target=0.3).pinned == ()


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
    reference, own = make({}, products="none"), {"pin": "none", "modules": ["1", "3", "5", "7"]}
    found = Search(reference, make, [data], 0.6, **own).run()
    assert found.pinned == ("3",)
    assert found.reached.worst <= 0.6 < found.all_half.worst
    # With all products in half no bit differs from the run without a recipe.
    tight = Search(reference, make, [data], 1e-12, **own).run()
    assert (tight.pinned, tight.reached.worst) == (("1", "3", "5", "7"), 0.0)


def searched(folder: Path, capsys: Shown, *words: str) -> tuple[str, list[str], dict[str, str]]:
    """What the command prints, its proof's runs, and the pins it writes."""
    main(["device=cpu", "callbacks.progress_bar=null", f"out={folder}", "batches=1", *words])
    printed = capsys.readouterr().out
    assert (folder / "search.md").read_text().strip() in printed
    proof = printed.split("## Proof")[1].splitlines()
    runs = [line.split(" | ")[0][2:] for line in proof if line.startswith("| ")]
    lists = OpLists.from_mapping(yaml.safe_load((folder / "ops.yaml").read_text()))
    return printed, runs[-3:], dict(lists.modules)


@pytest.mark.slow
def test_the_command_writes_lists_that_train(tmp_path: Path, capsys: Shown) -> None:
    model = ["model._target_=test_search.one_fault", "+model.inputs=64", "+model.classes=10"]
    words = [*model, "dtype=mixed", "prove=20", "seeds=2"]
    printed, runs, pins = searched(tmp_path, capsys, *words)
    assert (runs, pins) == (["fp32", "found", "all in half"], {"3": "fp32"})
    assert "found: 1 of 6 modules in fp32" in printed
    assert "    ops.modules.3=fp32\n" in printed
    assert "| all in half | 2 of 2 diverged | 2 of 2 diverged |" in printed
    assert "within the range of fp32's seeds" in printed


def test_the_command_writes_which_products_stay_in_half(tmp_path: Path, capsys: Shown) -> None:
    words = ["model._target_=test_search.spiky", "dtype=mixed_bf16", "dtype/products=nvfp4"]
    printed, runs, pins = searched(tmp_path, capsys, *words, "target=1e-9", "prove=1", "seeds=1")
    assert "# What must stay in half (mixed, nvfp4)" in printed
    assert "found: 4 of 4 modules in half, gradients 0, loss 0\n" in printed
    assert "    ops.modules.1=none ops.modules.3=none ops.modules.5=none" in printed
    assert "## Modules, each alone in nvfp4, the worst first" in printed
    assert "## Ops" not in printed
    assert (runs, pins) == (["half", "found", "all in nvfp4"], dict.fromkeys("1357", "none"))


def test_a_mistake_is_one_line(capsys: Shown) -> None:
    for word, line in (
        ("dtype=fp32", "dtype.mode=fp32: nothing is in half; choose dtype=mixed or dtype=amp"),
        ("target=0", "target=0: must be a number > 0"),
        ("batches=none", "batches=none: must be a whole number >= 1"),
        ("batches=0.5", "batches=0.5: must be a whole number >= 1"),
        ("seeds=2.7", "seeds=2.7: must be a whole number >= 1"),
        ("prove=-1", "prove=-1: must be a whole number >= 0"),
    ):
        with pytest.raises((SystemExit, ConfigError)):
            main([word])
        assert line in capsys.readouterr().err


def test_the_pin_with_the_smallest_error_is_tried_first() -> None:
    search = Search.__new__(Search)
    search._target, needed = 0.5, [{"worst"}, {"middle", "least"}]  # Either pair keeps the target.
    search._with = lambda pinned: RelativeError(0.0, float(not any(e <= {*pinned} for e in needed)))
    pinned, error = search._prune(["worst", "middle", "least"], RelativeError(0.0, 0.0))
    assert (pinned, error.worst) == (["worst"], 0.0)
