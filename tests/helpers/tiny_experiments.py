"""What makes each shipped experiment small enough for a test."""

from pathlib import Path

import pytest

from mpframe.config.locations import CONF

_TEXTS = {path.stem: path.read_text("utf-8") for path in (CONF / "experiment").glob("*.yaml")}
EXPERIMENTS = sorted(
    [*_TEXTS, *(f"{name}_small" for name, text in _TEXTS.items() if "${size:" in text)]
)
"""Each shipped experiment; the small size of one that has two has `_small` behind its name."""

# DATA is the folder of the fixture `tiny_data`.
_FILES = "dataset.root=DATA"
# As on the copy in JPEG: the format of CIFAR-10 itself has 60,000 images at least, which only large
# batches read soon.
_JPEG = f"dataset=image_folder {_FILES}/image_folder dataset.batch_size=8 dataset.workers=0"
_UNET = "model.width=4 dataset.image_size=16 dataset.workers=0"
_BERT = (
    "dataset.batch_size=4 dataset.workers=0 dataset.vocab_size=200 "
    "model.config.num_hidden_layers=1 model.config.hidden_size=24"
)
_SCENES = "dataset.train=16 dataset.val=2 dataset.test=2 dataset.image_size=64 dataset.workers=0"
_SPEECH = "dataset.train=64 dataset.val=8 dataset.test=8 dataset.max_labels=3"
TINY = {
    "bert_classifier": f"{_FILES}/text_folder {_BERT}",
    "bert_classifier_small": f"{_FILES}/text_folder {_BERT}",
    "bert_spans": _BERT,
    "bert_spans_small": _BERT,
    "bikes": f"{_FILES}/bikes",
    "cifar10_adamw": f"{_JPEG} model.width=8",
    "cifar10_resnet18": f"{_FILES}/cifar10 dataset.batch_size=500 dataset.workers=0 model.width=2",
    "cifar10_small": f"{_FILES}/image_folder dataset.batch_size=8",
    "detection_ssd": f"{_SCENES} dataset.batch_size=8 model.width=4",
    "detection_ssd_small": f"{_SCENES} model.width=4",
    "detection_torchvision": f"{_SCENES} dataset.batch_size=2",
    "digits_gan": "",
    "digits_mlp": "",
    "fashion_mnist_cnn": f"{_FILES}/fashion_mnist dataset.batch_size=8",
    "fine_tuning": f"{_FILES}/image_folder dataset.image_size=32 dataset.batch_size=8 "
    "dataset.workers=0 init_from=null init_from_except=[]",
    "fine_tuning_backbone": f"{_FILES}/fashion_mnist dataset.batch_size=8",
    "fine_tuning_digits": "init_from=null init_from_except=[]",
    "gpt": "dataset.batch_size=2 dataset.context=8 dataset.workers=0 dataset.eval_windows=8 "
    "model.depth=1",
    "gpt_small": "dataset.batch_size=2 dataset.context=8 dataset.eval_windows=8",
    "image_folder_resnet18": f"{_FILES}/image_folder dataset.batch_size=8 dataset.workers=0 "
    "model.width=8",
    "ladder": f"{_JPEG} model.width=8",
    "ladder_digits": "",
    "photographs_unet": f"{_FILES}/mask_folder {_UNET}",
    "photographs_unet_small": f"{_FILES}/mask_folder {_UNET}",
    "rossmann": f"{_FILES}/rossmann",
    "shapes_unet": f"dataset.images=64 {_UNET}",
    "shapes_unet_small": f"dataset.images=64 {_UNET}",
    "speech_lstm": f"{_SPEECH} dataset.workers=0 model.hidden=16 model.layers=2",
    "speech_lstm_small": _SPEECH,
}


def skip_without_extras(experiment: str) -> None:
    """Skips a test of an experiment whose YAML says that it needs packages that are not here."""
    if "mpframe[text]" in _TEXTS[chosen(experiment)[0].partition("=")[2]]:
        pytest.importorskip("transformers", reason="needs pip install mpframe[text]")


def tiny(experiment: str, data: Path) -> list[str]:
    """The words that choose a shipped experiment and make it small; "" is what runs by default."""
    if not experiment:
        return []
    skip_without_extras(experiment)
    return [*chosen(experiment), *TINY[experiment].replace("DATA", str(data)).split()]


def chosen(experiment: str) -> list[str]:
    """The words that choose a shipped experiment in a size."""
    if experiment in _TEXTS:
        return [f"experiment={experiment}"]
    return [f"experiment={experiment.removesuffix('_small')}", "+size=small"]
