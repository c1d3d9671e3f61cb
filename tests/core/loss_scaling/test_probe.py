"""The start scale from a probe: exact powers of two, and a backward pass without a trace."""

import copy
import math
from functools import partial

import pytest
import torch
from prepared import prepared
from torch import nn
from torch.optim import SGD
from vocabulary import HALVES, differing, same_bits

from mpframe import Backoff, LogMax, OpLists, Precision
from mpframe.core.objective import supervised
from mpframe.training.probe import probe_amax, safe_scale

INF, NAN = math.inf, math.nan
CROSS_ENTROPY = supervised(nn.CrossEntropyLoss())
adaptive = pytest.mark.parametrize("kind", [Backoff, LogMax])
in_half = pytest.mark.parametrize(
    ("mode", "half"), [("mixed", "float16"), ("mixed", "bfloat16"), ("amp", "float16")]
)


def probed(kind, amax, **options):
    scaler = kind(init_scale="probe", **options)
    scaler.start_from(torch.tensor(amax, dtype=torch.float32))
    return float(scaler.scale)


@adaptive
def test_the_limit_itself_fits_both_ends_clamp_and_no_number_leaves_the_default(kind) -> None:
    for amax, floor, scale in (
        (2.0**-149, 1.0, 2.0**24),
        (2.0**20, 1.0, 1.0),
        (1.0, 1.0, 2.0**14),
        (32752.0, 1.0, 1.0),
        (32752.01, 0.5, 0.5),
        *((nothing, 1.0, 2.0**16) for nothing in (0.0, INF, NAN)),  # It says nothing.
    ):
        assert probed(kind, amax, min_scale=floor) == scale
    assert probed(kind, 1.0, half=torch.bfloat16, max_scale=2.0**127) == 2.0**126
    for nothing in (0.0, INF, NAN):
        assert probed(kind, nothing, max_scale=2.0**10) == 2.0**10
        assert safe_scale(nothing, torch.float16) is None


@adaptive
def test_only_a_scaler_told_to_waits_for_a_probe_and_only_until_it_starts_anew(kind) -> None:
    """Also in a run that is resumed."""
    assert not kind().wants_probe
    for start in (kind.start_from, kind.update):
        scaler = kind(init_scale="probe")
        assert (scaler.wants_probe, scaler.scale) == (True, 2.0**16)
        for init_scale, waits in ((1.0, True), ("probe", False)):
            resumed = kind(init_scale=init_scale)
            resumed.load_state_dict(scaler.state_dict())
            assert resumed.wants_probe is waits is scaler.wants_probe
            start(scaler, torch.tensor(1.0))
    used, fresh = kind(), kind()
    used.update(torch.tensor(INF))
    for scaler in (used, fresh):
        scaler.start_from(torch.tensor(0.25))
    assert used.state_dict() == fresh.state_dict()


@pytest.mark.parametrize("half", HALVES.values())
def test_a_safe_scale_leaves_the_octaves_free_and_no_more(half) -> None:
    """A gradient at the edge still fits, and the next number does not."""
    for free, exponent in ((0, -140), (1, -24), (3, 0), (1, 15)):
        edge = math.ldexp(torch.finfo(half).max, exponent - free)  # Moved exactly.
        assert safe_scale(edge, half, free) == math.ldexp(1.0, -exponent)
        beyond = math.nextafter(edge, INF)
        assert safe_scale(beyond, half, free) == math.ldexp(1.0, -exponent - 1)
    limit = torch.finfo(half).max / 2
    for amax in (2.0**-149, 1e-9, 0.3, 3e38):
        scale = safe_scale(amax, half)
        assert scale * amax <= limit < 2 * scale * amax


@in_half
def test_a_probe_finds_the_highest_scale_that_fits_and_leaves_no_trace(mode, half, caplog) -> None:
    """Steps after a probe are bit for bit those without it, at the same scale, which is logged."""
    caplog.set_level("INFO")
    chance = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(8, 1, 8, 8, generator=chance), torch.arange(8)

    def trainer(start):
        torch.manual_seed(0)
        head = (nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10))
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *head)
        kind = Backoff if mode == "mixed" else LogMax
        scaler = kind(init_scale=start, half=half, min_scale=2.0**-20, max_scale=2.0**100)
        return prepared(model, CROSS_ENTROPY, mode, half, partial(SGD, lr=0.01), scaler=scaler)

    probing = trainer("probe")
    before = copy.deepcopy(probing.state_dict()["weights"])
    torch.manual_seed(5)
    probing.probe((inputs, targets))
    assert differing(before, probing.state_dict()["weights"]) == []
    assert all(parameter.grad is None for parameter in probing.model.parameters())
    scale = float(probing.scaler.scale)
    assert caplog.messages[-1].endswith(f", first loss scale {scale:g}")
    steps = [probing.train_step((inputs, targets)) for _ in range(3)]
    plain = trainer(scale)
    torch.manual_seed(5)
    expected = [plain.train_step((inputs, targets)).loss for _ in range(3)]
    assert same_bits([step.loss for step in steps], expected)
    assert not steps[0].skipped
    # The largest parameter gradient is no larger than what the probe saw, so it stays in range.
    assert float(steps[0].amax) * scale <= torch.finfo(HALVES[half]).max
    if half == "float16":
        assert trainer(scale * 2.0**6).train_step((inputs, targets)).skipped


ROWS, LABELS = torch.linspace(-2, 2, 32).sin().view(4, 8), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(("ops", "half"), [("none", "float16"), ("default", "bfloat16")])
def test_half_weights_are_probed_as_the_fp32_numbers_they_are(ops, half) -> None:
    torch.manual_seed(0)
    precision = Precision("mixed", half, ops=OpLists.named(ops), compute="emulated")
    narrow, full = (
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        for _ in range(2)
    )
    precision.prepare(narrow, SGD(narrow.parameters(), lr=0.1))
    full.load_state_dict(narrow.state_dict())  # The same rounded weights, stored in fp32.
    before = [p.detach().clone() for p in narrow.parameters()]
    both = ((narrow, precision), (full, Precision()))
    assert torch.equal(*(probe_amax(own, CROSS_ENTROPY, how, (ROWS, LABELS)) for own, how in both))
    assert same_bits(narrow.parameters(), before)
