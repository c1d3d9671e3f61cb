"""Which optimizer gets which parameter, from patterns and from the shipped configurations."""

import copy
from functools import partial

import pytest
import torch
from test_param_groups import batches, trainer_of
from torch import nn
from vocabulary import differing

from mpframe.core.errors import ConfigError
from mpframe.training.optimizers.selection import Selection, divide_parameters
from mpframe.workloads.images import mlp


def names(model: nn.Module, parts: dict[str, list[nn.Parameter]]) -> dict[str, list[str]]:
    known = {parameter: name for name, parameter in model.named_parameters()}
    return {part: [known[parameter] for parameter in own] for part, own in parts.items()}


def test_the_first_part_that_selects_a_parameter_gets_it() -> None:
    model = mlp(4, classes=2, hidden=8)
    parts = divide_parameters(
        model,
        {"matrices": Selection(["*"], without=["head.*"], ndim=2), "rest": Selection(["*"])},
    )
    assert names(model, parts) == {
        "matrices": ["hidden1.linear.weight", "hidden2.linear.weight"],
        "rest": ["hidden1.linear.bias", "hidden2.linear.bias", "head.weight", "head.bias"],
    }


def test_frozen_and_tied_parameters() -> None:
    model = mlp(8, classes=8, hidden=8)
    model.hidden1.linear.weight.requires_grad_(False)
    model.head.weight = model.hidden2.linear.weight
    parts = divide_parameters(model, {"all": Selection()})
    assert len(parts["all"]) == len({p for p in model.parameters() if p.requires_grad}) == 4


@pytest.mark.parametrize(
    ("selections", "line"),
    [
        ({"head": Selection(["head.*"])}, r'optimizer\.parts: none of head takes hidden1\.linear\.weight; add a last part with parameters=\["\*"\]'),
        ({"a": Selection(), "b": Selection(["hed.weight"])}, r"optimizer\.parts\.b\.parameters=\['hed\.weight'\]: no parameter is left for it; nearest: head\.weight"),
        ({"a": Selection(), "b": Selection(["*"], ndim=7)}, r"optimizer\.parts\.b\.parameters=\['\*'\]: no parameter is left for it; the names are hidden1\.linear\.weight"),
    ],
)  # fmt: skip
def test_what_divides_nothing_is_refused(selections: dict[str, Selection], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        divide_parameters(mlp(4, classes=2, hidden=8), selections)


built = partial(trainer_of, small=False)


def test_muon_gets_the_matrices() -> None:
    trainer = built("optimizer=muon_adamw", "model=mlp", "dtype=mixed")
    (matrices, rest) = trainer.optimizer.parts.values()  # type: ignore[union-attr]
    assert isinstance(matrices.optimizer, torch.optim.Muon)
    assert [tuple(p.shape) for p in matrices.parameters] == [(256, 64), (256, 256)]
    assert len(rest.parameters) == 4
    assert list(trainer.algorithms["schedule"].by_name) == ["matrices", "rest"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["optimizer=gan"], r"optimizer\.parts: none of discriminator, generator takes|optimizer\.parts\.discriminator\.parameters=\['discriminator\.\*'\]"),
        (["optimizer=muon_adamw", "model=mlp", "optimizer.scalers=each"], r"optimizer\.scalers=each: there is one loss"),
        (["optimizer=muon_adamw", "optimizer.parts.rest.lr=-1"], r"optimizer\.parts\.rest\.lr=-1: must be a number or null > 0"),
        (["experiment=digits_gan", "optimizer=adamw"], r"optimizer\.parts=none: the losses are discriminator, generator; give each an optimizer"),
        (["numerics=on", "trainer.compile=true"], r"numerics\.every=100: a compiled model has no modules to watch; use trainer\.compile=false or numerics=off"),
        (["trainer.recompute=[net.*]", "trainer.compile=true"], r"trainer\.recompute=\['net\.\*'\]: a compiler chooses itself what it computes again; use trainer\.compile=false or trainer\.recompute=\[\]"),
        (["model=mlp", "trainer.recompute=[block7]"], r"trainer\.recompute=\[block7\]: matches no module; the names are "),
        (["model=mlp", "trainer.channels_last=true"], r"trainer\.channels_last=true: the model has no 2-d convolution \(no weight with four dimensions\), so nothing would change; use trainer\.channels_last=false"),
        (["experiment=digits_gan", "callbacks.loss_spikes.policy=skip"], r"callbacks\.loss_spikes\.policy=skip: judges one loss, and the dataset has 2"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        built(*overrides)


def test_a_model_is_recomputed_and_reordered_as_its_options_say() -> None:
    trainer = built(
        "model=unet",
        "model.width=4",
        "model.channels=1",
        "model.classes=2",
        "trainer.recompute=[encoder.*]",
        "trainer.channels_last=true",
    )
    assert [name for name, own in trainer.model.named_modules() if "forward" in vars(own)] == [
        f"encoder.{stage}" for stage in range(4)
    ]
    assert trainer.model.head.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("scalers", "count"), [("shared", 1), ("each", 2)])
def test_scalers_by_configuration(scalers: str, count: int) -> None:
    assert len(built("experiment=digits_gan", f"optimizer.scalers={scalers}").scalers) == count


def test_lbfgs_by_configuration_resumes_bit_for_bit() -> None:
    words = ["model=mlp", "model.hidden=8", "dtype=fp32", "loss_scaling=none", "scheduler=none"]
    words += ["optimizer._target_=torch.optim.LBFGS", "optimizer.lr=0.1", "optimizer.max_iter=4"]
    whole, resumed = built(*words), built(*words)
    data = batches(4)
    for batch in data[:2]:
        whole.train_step(batch)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for batch in data[2:]:
        for trainer in (whole, resumed):
            trainer.train_step(batch)
    assert not differing(whole.state_dict(), resumed.state_dict())
    assert whole.progress.steps == 4
