"""From samples to batches: datasets, and the loader that reads them in a reproducible order.

A dataset is a function that returns a `Task`: the samples to train on, to validate on and to test
on, the loss, and the metrics. A batch is any tree of tensors.

    task         what a dataset returns
    loading      which batch comes when, and why a resumed run sees the same ones: begin here
    streaming    the same of a stream, whose next epoch goes on where it stood
    shares       the part of a stream that one worker reads
    fetching     one batch of the samples that are asked for
    workers      watches the processes that load
    samples      random numbers by key, samples that are held out, generated samples
    metrics      accuracy and others, counted on the device
    prediction   a model's outputs as a table, in the place of a metric
    images       digits and Fashion-MNIST, small images a batch at a time
    cifar        CIFAR-10
    image_files  folders of images

The shortest dataset is `digits` in images.py. Other tasks are in mpframe/workloads. The datasets of
files are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpframe.data.images import ArrayImages as ArrayImages
from mpframe.data.images import Images as Images
from mpframe.data.images import Normalize as Normalize
from mpframe.data.images import digits as digits
from mpframe.data.images import fashion_mnist as fashion_mnist
from mpframe.data.loading import Loader as Loader
from mpframe.data.metrics import RMSE as RMSE
from mpframe.data.metrics import RMSPE as RMSPE
from mpframe.data.metrics import Accuracy as Accuracy
from mpframe.data.metrics import BitsPerByte as BitsPerByte
from mpframe.data.metrics import Dice as Dice
from mpframe.data.metrics import IoU as IoU
from mpframe.data.metrics import Perplexity as Perplexity
from mpframe.data.task import Metric as Metric
from mpframe.data.task import Task as Task
from mpframe.data.task import classification as classification

if TYPE_CHECKING:
    from mpframe.data.cifar import cifar10 as cifar10
    from mpframe.data.image_files import image_folder as image_folder

_HOMES = {"cifar10": "cifar", "image_folder": "image_files"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"mpframe.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'mpframe.data' has no attribute {name!r}")
