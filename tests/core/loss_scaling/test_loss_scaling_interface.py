"""What a scaler is called in summaries and saved states."""

import pytest
import torch

from mpframe.core.loss_scaling import Backoff, LogMax, Scaler, Static, auto, none
from mpframe.core.loss_scaling.scaler import LossScaler, name_of


class Mine(Backoff):
    """A user's, derived from one of ours."""


class Other:
    """A user's, derived from nothing of ours."""

    scale = torch.ones(())


@pytest.mark.parametrize(
    ("scaler", "name"),
    [
        (Static(), "static"),
        (Backoff(), "Backoff"),
        (LogMax(), "LogMax"),
        (Mine(), "Mine"),
        (Scaler({"scale": torch.ones(())}), "Scaler"),
        (Other(), "Other"),
        (none(), "none"),
        (auto("mixed", "float16"), "Backoff"),
        (auto("amp", torch.float16), "Backoff"),
        (auto("mixed", "bfloat16"), "none"),
        (auto("fp32", "float16"), "none"),
    ],
)
def test_it_is_called_by_its_kind_or_class(scaler: LossScaler | None, name: str) -> None:
    assert name_of(scaler) == name
