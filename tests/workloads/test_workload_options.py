"""The sizes of the workloads' models and generated data, refused where they are out of range."""

from typing import Any

import pytest
from refusal import refused

from mpframe.core.errors import ConfigError
from mpframe.workloads.detection import SSD, scenes
from mpframe.workloads.images import cnn, mlp, resnet18
from mpframe.workloads.segmentation.data import shapes
from mpframe.workloads.segmentation.model import UNet
from mpframe.workloads.speech import LSTM, phonemes
from mpframe.workloads.tables.model import Tabular
from mpframe.workloads.text.language_model import GPT

OTHERS: dict[Any, dict[str, Any]] = {
    mlp: {"in_features": 4, "classes": 2},
    cnn: {"channels": 1, "classes": 2},
    UNet: {"channels": 1, "classes": 2},
    Tabular: {"categories": {"a": 2}, "continuous": []},
    LSTM: {"features": 6, "classes": 5},
    SSD: {"classes": 4, "image_size": 64},
    GPT: {"vocab_size": 11, "context": 8, "width": 16},
}
WHOLE, SHARE = "must be a whole number >=", "must be >= 0 and < 1"


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (mlp, {"in_features": [3, 0]}, f"model.in_features=0: {WHOLE} 1"),
        (mlp, {"depth": 0}, f"model.depth=0: {WHOLE} 1"),
        (mlp, {"dropout": 1.0}, f"model.dropout=1.0: {SHARE}"),
        (cnn, {"width": 1.5}, f"model.width=1.5: {WHOLE} 1"),
        (cnn, {"dropout": -0.1}, f"model.dropout=-0.1: {SHARE}"),
        (resnet18, {"classes": True}, f"model.classes=True: {WHOLE} 1"),
        (UNet, {"stages": 0}, f"model.stages=0: {WHOLE} 1"),
        (Tabular, {"categories": {}}, "model.categories, model.continuous: are both"),
        (Tabular, {"categories": {"a": 0}}, f"model.categories.a=0: {WHOLE} 1"),
        (Tabular, {"hidden": [4, 0]}, f"model.hidden.1=0: {WHOLE} 1"),
        (Tabular, {"embedding_dropout": -0.1}, "model.embedding_dropout=-0.1: must be >= 0"),
        (LSTM, {"layers": 0}, f"model.layers=0: {WHOLE} 1"),
        (LSTM, {"dropout": 1.0}, f"model.dropout=1.0: {SHARE}"),
        (SSD, {"width": 0.5}, f"model.width=0.5: {WHOLE} 1"),
        (GPT, {"depth": 0}, f"model.depth=0: {WHOLE} 1"),
        (GPT, {"heads": 3}, "model.width=16: must be a multiple of model.heads=3"),
        (phonemes, {"train": 0}, f"dataset.train=0: {WHOLE} 1"),
        (phonemes, {"classes": 1}, f"dataset.classes=1: {WHOLE} 2"),
        (phonemes, {"data_seed": -1}, f"dataset.data_seed=-1: {WHOLE} 0"),
        (phonemes, {"noise": float("nan")}, "dataset.noise=nan: must be a number >= 0"),
        (scenes, {"val": 0}, f"dataset.val=0: {WHOLE} 1"),
        (scenes, {"channels": 1}, "dataset.channels=1: scenes has 3; set dataset.channels=3"),
        (scenes, {"classes": 3}, "dataset.classes=3: scenes has 4; set dataset.classes=4"),
        (scenes, {"image_size": 8}, f"dataset.image_size=8: {WHOLE} 16"),
        (shapes, {"image_size": 7}, "dataset.image_size=7: "),
        (shapes, {"channels": 0}, "dataset.channels=0: "),
        (shapes, {"most_shapes": 0}, "dataset.most_shapes=0: "),
        (shapes, {"classes": 3}, "dataset.classes=3: "),
        *((make, {"cache_bytes": -1}, f"dataset.cache_bytes=-1: {WHOLE} 0")
          for make in (phonemes, scenes, shapes)),
    ],
)  # fmt: skip
def test_what_is_out_of_range(make: Any, given: dict[str, Any], text: str) -> None:
    assert refused(ConfigError, make, **{**OTHERS.get(make, {}), **given}).startswith(text)
