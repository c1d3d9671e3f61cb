"""What makes each shipped experiment small enough for a test."""

import re
from pathlib import Path

import pytest

from mpframe.config.locations import CONF

_TEXTS = {path.stem: path.read_text("utf-8") for path in (CONF / "experiment").glob("*.yaml")}
# Each shipped experiment; the small size of one that has two has `_small` behind its name.
_SMALL = [f"{name}_small" for name, text in _TEXTS.items() if "${size:" in text]
EXPERIMENTS = sorted([*_TEXTS, *_SMALL])

# Behind each name, what makes it small. DATA is the folder of the fixture `tiny_data`. Images of
# CIFAR-10 are the copy in JPEG: its own format has 60,000 at least, which only large batches read.
_BERT = """dataset.batch_size=4 dataset.workers=0 dataset.vocab_size=200
    model.config.num_hidden_layers=1 model.config.hidden_size=24"""
_JPEG = "dataset=image_folder dataset.root=DATA/image_folder dataset.batch_size=8 dataset.workers=0"
_UNET = "model.width=4 dataset.image_size=16 dataset.workers=0"
_SCENES = "dataset.train=16 dataset.val=2 dataset.test=2 dataset.image_size=64 dataset.workers=0"
_SPEECH = "dataset.train=64 dataset.val=8 dataset.test=8 dataset.max_labels=3"
_ROWS = f"""
bert_classifier bert_classifier_small: dataset.root=DATA/text_folder {_BERT}
bert_spans bert_spans_small: {_BERT}
bikes: dataset.root=DATA/bikes
cifar10_adamw: {_JPEG} model.width=8
cifar10_resnet18: dataset.root=DATA/cifar10 dataset.batch_size=500 dataset.workers=0 model.width=2
cifar10_small: dataset.root=DATA/image_folder dataset.batch_size=8
detection_ssd: {_SCENES} dataset.batch_size=8 model.width=4
detection_ssd_small: {_SCENES} model.width=4
detection_torchvision: {_SCENES} dataset.batch_size=2
digits_gan:
digits_mlp:
fashion_mnist_cnn: dataset.root=DATA/fashion_mnist dataset.batch_size=8
fine_tuning: dataset.root=DATA/image_folder dataset.image_size=32 dataset.batch_size=8
    dataset.workers=0 init_from=null init_from_except=[]
fine_tuning_backbone: dataset.root=DATA/fashion_mnist dataset.batch_size=8
fine_tuning_digits: init_from=null init_from_except=[]
gpt: dataset.batch_size=2 dataset.context=8 dataset.workers=0 dataset.eval_windows=8 model.depth=1
gpt_small: dataset.batch_size=2 dataset.context=8 dataset.eval_windows=8
image_folder_resnet18: dataset.root=DATA/image_folder dataset.batch_size=8 dataset.workers=0
    model.width=8
ladder: {_JPEG} model.width=8
ladder_digits:
photographs_unet photographs_unet_small: dataset.root=DATA/mask_folder {_UNET}
rossmann: dataset.root=DATA/rossmann
shapes_unet shapes_unet_small: dataset.images=64 {_UNET}
speech_lstm: {_SPEECH} dataset.workers=0 model.hidden=16 model.layers=2
speech_lstm_small: {_SPEECH}
"""
_WORDS = re.findall(r"^([\w ]+):((?:.|\n )*)", _ROWS, re.M)
TINY = {name: words for names, words in _WORDS for name in names.split()}


def tiny(experiment: str, data: Path) -> list[str]:
    """The words that choose a shipped experiment and make it small; "" is what runs by default."""
    if not experiment:
        return []
    name = experiment if experiment in _TEXTS else experiment.removesuffix("_small")
    if "mpframe[text]" in _TEXTS[name]:  # Its YAML says what it needs.
        pytest.importorskip("transformers", reason="needs pip install mpframe[text]")
    size = [] if name == experiment else ["+size=small"]
    return [f"experiment={name}", *size, *TINY[experiment].replace("DATA", str(data)).split()]
