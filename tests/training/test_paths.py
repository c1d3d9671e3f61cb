"""Ported suites pass where each parameter is updated by itself."""

import subprocess
import sys

import pytest
import torch
from checkout import ROOT
from fixtures import Patch
from paths import PATHS
from torch import nn

from mpframe import Precision


@pytest.mark.slow
def test_ported_suites_pass_in_buckets() -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--path=buckets"]
    command = [sys.executable, *words, "tests/ports/test_trainers.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_each_parameter_has_a_bucket_there(monkeypatch: Patch) -> None:
    PATHS["buckets"](monkeypatch)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = torch.optim.AdamW(model.parameters())
    model, optimizer = Precision("mixed", "bfloat16").prepare(model, own)
    assert len(optimizer._buckets) == len(list(model.parameters()))
