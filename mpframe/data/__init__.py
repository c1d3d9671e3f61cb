"""From samples to batches: datasets, and the loader that reads them in a reproducible order.

A dataset is a function that returns a `Task`: the samples to train on, to validate on and to test
on, the loss, and the metrics. A batch is any tree of tensors.

    task         what a dataset returns
    loading      which batch comes when, and why a resumed run sees the same ones: begin here
    fetching     one batch of the samples that are asked for
    workers      watches the processes that load
    samples      random numbers by key, samples that are held out, generated samples
    metrics      accuracy and others, counted on the device
    images       digits and Fashion-MNIST, small images a batch at a time
    cifar        CIFAR-10
    image_files  folders of images

The shortest dataset is `digits` in images.py. Other tasks are in mpframe/workloads. A name of the
package loads its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpframe.data.cifar import cifar10
    from mpframe.data.image_files import image_folder
    from mpframe.data.images import ArrayImages, Images, Normalize, digits, fashion_mnist
    from mpframe.data.loading import Loader
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
