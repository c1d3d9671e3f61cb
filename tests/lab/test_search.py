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

from mpframe import OpLists, Precision, Trainer
from mpframe.cli.commands.search import main
from mpframe.lab.search import Pins, RelativeError, Search

LOSS = nn.CrossEntropyLoss()


class Scaled(nn.Linear):
    """Its product with scaled inputs, scaled back; half has no room for it."""

    scale = 1e6

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.scale, self.weight, None) / self.scale + self.bias


class Cold(Scaled):
    scale = 1e-9


def healthy() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def one_fault(inputs: int = 8, classes: int = 4) -> nn.Module:
    ends = nn.Linear(inputs, 32), nn.Linear(32, classes)
    return nn.Sequential(nn.Flatten(), ends[0], nn.Tanh(), Scaled(32, 32), nn.Tanh(), ends[1])


def two_faults() -> nn.Module:
    conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
    rest = [Cold(32, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), Scaled(16, 16)]
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), conv, nn.Flatten(), *rest, nn.Linear(16, 4))


ROWS: list[Any] = [
    (one_fault, "amp", "float16", 0.1, ["3"]),
    (two_faults, "mixed", "float16", 0.1, ["3", "7"]),
    (one_fault, "mixed", "bfloat16", 0.3, []),
    (healthy, "mixed", "float16", 0.1, []),
    # With every product in fp32 no bit differs from fp32.
    (healthy, "mixed", "float16", 1e-12, ["0", "2"]),
]


@pytest.mark.parametrize(("planted", "mode", "half", "target", "pinned"), ROWS)
def test_exactly_the_planted_modules_are_found(
    planted: Any, mode: str, half: str, target: float, pinned: list[str]
) -> None:
    def make(pins: Pins, alone: str | None) -> Trainer:
        torch.manual_seed(0)
        lists = OpLists.named()
        moved = {op: "deny" for op in lists.allow if alone not in (None, op)}
        ops = OpLists(lists.allow, lists.deny, lists.infer, modules=dict(pins)).moved(moved)
        return prepared(planted(), LOSS, Precision(mode, half, ops=ops))

    torch.manual_seed(0)
    reference = prepared(planted(), LOSS, "fp32", half)
    torch.manual_seed(1)
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(2)]
    found = Search(reference, make, batches, target).run(["linear"])
    assert list(found.pinned) == pinned
    assert found.reached.worst <= target
    assert (found.all_half.worst > target, found.ops[0].error.worst > target) == (bool(pinned),) * 2
    assert {own.name for own in found.modules[: len(pinned)]} == {*pinned}
    assert found.reached.worst == 0.0 or target > 1e-12


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
        return prepared(spiky(), LOSS, Precision("mixed", "bfloat16", ops=ops, products=products))

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(64, 64, generator=generator), torch.arange(64) % 16
    reference, own = make({}, products="none"), {"pin": "none", "modules": ["1", "3", "5", "7"]}
    found = Search(reference, make, [data], 0.6, **own).run()
    assert found.pinned == ("3",)
    assert found.reached.worst <= 0.6 < found.all_half.worst
    # With all products in half no bit differs from the run without a recipe.
    tight = Search(reference, make, [data], 1e-12, **own).run()
    assert (tight.pinned, tight.reached.worst) == (("1", "3", "5", "7"), 0.0)


def test_the_command_writes_which_stay_and_proves_it(tmp_path: Path, capsys: Shown) -> None:
    fault = "model._target_=test_search.one_fault +model.inputs=64 +model.classes=10 dtype=mixed"
    products = "model._target_=test_search.spiky dtype=mixed_bf16 dtype/products=nvfp4 target=1e-9"
    for words, kept, others, pins, said in (
        (fault, "fp32", "float16", {"3": "fp32"}, "found: 1 of 6 modules in fp32"),
        (products, "half", "nvfp4", dict.fromkeys("1357", "none"),
         "found: 4 of 4 modules in half, gradients 0, loss 0\n"),
    ):  # fmt: skip
        own = ["device=cpu", "callbacks.progress_bar=null", f"out={tmp_path}", "batches=1"]
        main([*own, "prove=1", "seeds=1", *words.split()])
        printed = capsys.readouterr().out
        assert (tmp_path / "search.md").read_text().strip() in printed
        assert f"# What must stay in {kept} (mixed, " in printed
        assert said in printed
        assert (
            f"    {' '.join(f'ops.modules.{name}={pin}' for name, pin in pins.items())}" in printed
        )
        assert f"## Modules, each alone in {others}, the worst first" in printed
        assert ("## Ops" in printed) == (kept == "fp32")
        for run in (kept, "found", f"all in {others}"):
            assert f"\n| {run} | " in printed.split("## Proof")[1]
        lists = OpLists.from_mapping(yaml.safe_load((tmp_path / "ops.yaml").read_text()))
        assert lists.modules == pins


def test_the_pin_with_the_smallest_error_is_tried_first() -> None:
    search = Search.__new__(Search)
    search.target, needed = 0.5, [{"worst"}, {"middle", "least"}]  # Either pair keeps the target.
    search._with = lambda pinned: RelativeError(0.0, float(not any(e <= {*pinned} for e in needed)))
    pinned, error = search._prune(["worst", "middle", "least"], RelativeError(0.0, 0.0))
    assert (pinned, error.worst) == (["worst"], 0.0)
