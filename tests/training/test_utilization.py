"""callbacks=gradient_norms, utilization: norms of groups of layers, operations of a step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import Log, Patch, refused
from in_process import scalars, train

from mpframe import checkpoint
from mpframe.core.errors import ConfigError
from mpframe.training.callbacks import utilization
from mpframe.training.callbacks.utilization import Utilization

BATCH, HIDDEN = 32, 16
SMALL = [
    *("model=mlp", f"model.hidden={HIDDEN}", "model.depth=1", f"dataset.batch_size={BATCH}"),
    *("trainer.max_steps=4", "trainer.log_every=2", "trainer.eval_every=1"),
]
BOTH = "callbacks=[default,gradient_norms,utilization]"


@pytest.mark.parametrize(
    ("mode", "accumulate"),
    [
        *(("fp32", 1), ("mixed", 2), ("amp_bf16", 1)),
        pytest.param("amp_bf16 trainer.compile=true", 1, marks=pytest.mark.slow),
    ],
)
def test_a_steps_operations_are_those_of_its_products(
    mode: str, accumulate: int, tmp_path: Path, caplog: Log
) -> None:
    """Forward one product for each layer, backward one for weights and, after the first, inputs."""
    own = [*SMALL, *f"dtype={mode}".split(), f"trainer.accumulate={accumulate}"]
    caplog.set_level("INFO", "mpframe")
    train(tmp_path / "plain", *own)
    train(tmp_path / "run", *own, BOTH, "callbacks.utilization.peak_flops=1e9")
    first, second = 2 * BATCH * 64 * HIDDEN, 2 * BATCH * HIDDEN * 10
    step = accumulate * (2 * first + 3 * second)
    assert f"a step takes {step:.4g} floating-point operations" in caplog.text
    curves = scalars(tmp_path / "run")
    rates = curves["speed/flops_per_second"]
    assert [at for at, _ in rates] == [2, 4]
    speed = dict(curves["speed/samples_per_second"])
    for at, rate in rates:  # The same time, and event files store fp32.
        assert rate == pytest.approx(speed[at] * step / (BATCH * accumulate), rel=1e-6)
        assert dict(curves["speed/utilization"])[at] == pytest.approx(rate / 1e9, rel=1e-6)
    assert "speed/tokens_per_second" not in curves
    one, other = (
        checkpoint.load(tmp_path / name)["trainer"]["weights"] for name in ("plain", "run")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_tokens_are_counted_and_a_peak_is_known_by_name(tmp_path: Path, monkeypatch: Patch) -> None:
    own = [
        *("experiment=gpt", "+size=small", "trainer.max_steps=2", "trainer.log_every=1"),
        *("callbacks=[default,utilization]", "callbacks.utilization.tokens=true", "dtype=fp32"),
    ]
    train(tmp_path, *own)
    curves = scalars(tmp_path)
    speed, tokens = curves["speed/samples_per_second"], curves["speed/tokens_per_second"]
    length = tokens[0][1] / speed[0][1]
    assert length == pytest.approx(round(length), rel=1e-6)
    assert length >= 16
    assert "speed/utilization" not in curves
    half, cuda = SimpleNamespace(mode="amp", half="bfloat16"), torch.device("cuda")
    for name, peak in {
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989.4e12,
        "Tesla V100": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, own=name: own)
        assert utilization._peak_of(cuda, half) == peak
    assert utilization._peak_of(torch.device("cpu"), half) is None
    said = refused(ConfigError, Utilization, peak_flops=0.0)
    assert said.startswith("callbacks.utilization.peak_flops=0.0: must be ")


NAMES: dict[str, list[str]] = {
    "": ["head", "stage1", "stage2"],
    "callbacks.gradient_norms.groups={first:stage1.*}": ["first", "others"],
    "callbacks.gradient_norms.depth=2": [
        *("head", "stage1.conv1", "stage1.conv2", "stage1.norm1", "stage1.norm2"),
        *("stage2.conv1", "stage2.conv2", "stage2.norm1", "stage2.norm2"),
    ],
}


@pytest.mark.parametrize(("words", "clip"), [*zip(NAMES, ("null", "0.1", "null"), strict=True)])
def test_the_groups_norms_make_up_the_gradients(words: str, clip: str, tmp_path: Path) -> None:
    own = [
        "model.width=4",
        "trainer.max_steps=4",
        "trainer.log_every=2",
        f"trainer.clip_norm={clip}",
    ]
    steps = "dtype=amp", "loss_scaling=Backoff", "loss_scaling.init_scale=1e5"
    train(tmp_path, *own, *steps, "callbacks=[default,gradient_norms]", *words.split())
    curves = scalars(tmp_path)
    groups = {
        tag[11:]: dict(points) for tag, points in curves.items() if tag.startswith("grad/group")
    }
    assert sorted(groups) == NAMES[words]
    whole: Any = dict(curves["grad/norm"])
    for step in (2, 4):
        total = sum(points[step] ** 2 for points in groups.values()) ** 0.5
        expected = whole[step] if clip == "null" else min(whole[step], 0.1)
        assert total == pytest.approx(expected, rel=1e-5)  # torch clips to 0.1 / (1 + 1e-6 / norm).


def test_a_skipped_step_has_no_norms_and_a_pattern_must_match(tmp_path: Path) -> None:
    own = ["model=mlp", "trainer.max_steps=1", "callbacks=[default,gradient_norms]"]
    scale = ["trainer.log_every=1", "loss_scaling=Backoff", "loss_scaling.init_scale=16777216"]
    train(tmp_path / "skipped", *own, *scale)
    points = scalars(tmp_path / "skipped")
    steps = [at for at, _ in points["grad/group/head"]]
    skipped = int(points["loss_scale/skipped_total"][-1][1])
    assert skipped > 0
    assert steps == [skipped + 1]
    said = refused(
        ConfigError, train, tmp_path / "b", *own, "callbacks.gradient_norms.groups={a:b*}"
    )
    assert said == (
        "callbacks.gradient_norms.groups.a=[b*]: matches no parameter; the names are "
        "hidden1.linear.weight, hidden1.linear.bias, hidden2.linear.weight, "
        "hidden2.linear.bias, ..."
    )
