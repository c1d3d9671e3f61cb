"""From samples to batches: datasets, and the loader that reads them in a reproducible order.

A dataset is a function that returns a `Task`: the samples to train on, to validate on and to test
on, what is to minimise, and the metrics (task.py; the shortest is datasets/images/digits.py). A
batch is any tree of tensors: a tensor, tuples, lists, dicts.

Begin with loader.py: which batch comes when, and why a resumed run sees the same ones. fetch.py
makes one batch, wherever it runs; workers.py watches the processes that do; keyed_random.py is
where every random number comes from. The package may import objectives, because a task holds them,
and what is below them. It imports nothing that trains, and it knows no options: facts.py compares
the values that it is given.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpframe.data.datasets.images.arrays import ArrayImages, Images, Normalize
    from mpframe.data.datasets.images.cifar10 import cifar10
    from mpframe.data.datasets.images.digits import digits
    from mpframe.data.datasets.images.fashion_mnist import fashion_mnist
    from mpframe.data.datasets.images.image_folder import image_folder
    from mpframe.data.loader import Loader
    from mpframe.data.metrics import RMSE, RMSPE, Accuracy, BitsPerByte, Dice, IoU, Perplexity
    from mpframe.data.task import Metric, Task, classification

_HOMES = {
    "images": ["ArrayImages", "Images", "Normalize", "digits", "fashion_mnist"],
    "cifar": ["cifar10"],
    "image_files": ["image_folder"],
    "loading": ["Loader"],
    "metrics": ["RMSE", "RMSPE", "Accuracy", "BitsPerByte", "Dice", "IoU", "Perplexity"],
    "task": ["Metric", "Task", "classification"],
}

__all__ = [
    "RMSE",
    "RMSPE",
    "Accuracy",
    "ArrayImages",
    "BitsPerByte",
    "Dice",
    "Images",
    "IoU",
    "Loader",
    "Metric",
    "Normalize",
    "Perplexity",
    "Task",
    "cifar10",
    "classification",
    "digits",
    "fashion_mnist",
    "image_folder",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"mpframe.data.{module}"), name)
    raise AttributeError(f"module 'mpframe.data' has no attribute {name!r}")
