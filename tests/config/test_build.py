"""Devices and targets: what build makes of options, and what it refuses."""

import inspect
import re
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from fixtures import refused
from in_process import composed

from mpframe.config.command_line import check_config
from mpframe.config.overrides import rewrite
from mpframe.core.errors import ConfigError
from mpframe.run.parts import build_loaders, build_precision, resolve_device
from mpframe.run.target import make, options_of


def test_a_device_is_there_or_refused() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("gpu", "cpu:1", "cuda:x", "cpu:", "mps:", "cuda:", "cuda:²", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device={name}: this machine has none; choose .*a"):
            resolve_device(name)


@pytest.mark.parametrize("typed", ["ops.allow+=[exp,sofmax]", "ops.move.sofmax=allow"])
def test_an_unknown_op_is_refused(typed: str) -> None:
    line = refused(ConfigError, build_precision, check_config(composed(*rewrite([typed]))))
    said = "ops.move.sofmax=allow: 'sofmax' is not an op of PyTorch; nearest: softmax"
    assert line.startswith(said)


class Inherits(torch.nn.Linear):
    """Python's errors call its `__init__` the one of its base."""


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"_target_": "torch.nn"}, "_target_=torch.nn: is a module; name a class or function, as in torch.nn.Name"),
        ({"_target_": "torch.nn.Linear", "in_feature": 3}, "in_feature=3: torch.nn.Linear takes no such argument; nearest: in_features"),
        ({"_target_": "torch.nn.Linear", "in_features": 3}, r"^model: torch.nn.Linear refused its options: .*'out_features'$"),
        ({"_target_": "test_build.Inherits"}, r"test_build.Inherits refused .*Linear.__init__.*'in_features' and "),
        ({"_target_": "nowhere.Net"}, "^model._target_=nowhere.Net: there is no nowhere; install it, or put nowhere.py into the current folder$"),
        ({"_target_": "torch.nn.Linera"}, "^model._target_=torch.nn.Linera: there is no torch.nn.Linera; nearest: Linear, Bilinear$"),
        ({"_target_": "torch.Tensor.no"}, "_target_=torch.Tensor.no: AttributeError "),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_made_is_refused_in_one_line(
    node: Any, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert re.search(line, refused(ConfigError, make, "model", node))
    assert not caplog.records  # Hydra says nothing beside it.


def test_evaluations_have_a_batch_size_of_their_own() -> None:
    own: Any = SimpleNamespace(
        data=SimpleNamespace(batch_size=4, eval_batch_size=None, workers=0),
        trainer=SimpleNamespace(timeout=600.0),
        run=SimpleNamespace(seed=0, device="cpu", resume="none"),
    )
    two: Any = SimpleNamespace(data_size=2)
    task: Any = SimpleNamespace(
        train=range(8), val=range(7), test=range(6), collate=None, batches_per_epoch=None
    )
    assert [loader.batch_size for loader in build_loaders(own, task)] == [4, 4, 4]
    own.data.eval_batch_size = 3
    assert [loader.batch_size for loader in build_loaders(own, task)] == [4, 3, 3]
    for name, size in {"eval_batch_size": 1, "batch_size": 1}.items():
        setattr(own.data, name, size)
        with pytest.raises(ConfigError, match=rf"^dataset.{name}={size}: 2 ranks share each batch"):
            build_loaders(own, task, two)


def truths(
    plain=False,  # type: ignore[no-untyped-def]
    annotated: bool = True,
    optional: Optional[bool] = None,  # noqa: UP045
    text: "bool | None" = None,
    several: bool | str = False,
    number: float = 1e-8,
    size=4,
    nested: Any = None,
    **others: Any,
) -> dict[str, Any]:
    return {key: value for key, value in locals().items() if key != "others"} | others


HERE = {"_target_": f"{__name__}.truths"}


def test_a_word_is_no_truth_and_a_truth_is_no_number() -> None:
    for name in ("plain", "annotated", "optional", "text"):
        for value in ("off", "abc", 1, 0.0, "", "null"):
            node = {**HERE, name: value}
            for nested in (node, [{"key": node}]):
                said = refused(ConfigError, make, "model", {**HERE, "nested": nested})
                assert said.endswith(f".{name}={value}: must be true or false")
            assert refused(ConfigError, options_of, "model", node).startswith(f"model.{name}=")
    for name in ("number", "size"):
        with pytest.raises(ConfigError, match=rf"^optimizer.{name}=true: must be a number$"):
            make("optimizer", {**HERE, name: True})


class Narrow(dict[str, Any]):
    """Takes more than its signature says, as configurations of transformers do."""

    __signature__ = inspect.Signature()


def test_what_a_signature_leaves_open_or_is_passed_on_stays_as_it_is() -> None:
    given = {"several": "off", "other": "off", "number": None, "nested": "off", "optional": None}
    assert make("model", {**HERE, **given}).items() >= given.items()
    inner = {**HERE, "annotated": "off"}
    made = make("model", {**HERE, "_recursive_": False, "nested": inner})
    assert made["nested"]["annotated"] == "off"
    narrow = {"_target_": f"{__name__}.Narrow", "labels": 5}
    assert make("model", {**HERE, "nested": narrow})["nested"] == {"labels": 5}
