"""Ported suites pass in every way in which a step can be computed."""

import subprocess
import sys

import pytest
import torch
from checkout import ROOT
from fixtures import Patch
from paths import PATHS
from torch import nn

from mpframe import Precision
from mpframe.training.plan import Plan


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PATHS if path != "plain"])
def test_ported_suites_pass_on_every_path(path: str) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--path={path}"]
    command = [sys.executable, *words, "tests/ports/test_trainers.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_another_way(path: str, monkeypatch: Patch) -> None:
    PATHS[path](monkeypatch)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = torch.optim.AdamW(model.parameters())
    model, optimizer = Precision("mixed", "bfloat16").prepare(model, own)
    weights = list(model.parameters())
    assert len(optimizer._buckets) == (len(weights) if path == "buckets" else 1)
    assert Plan().compile == (path == "compiled")
