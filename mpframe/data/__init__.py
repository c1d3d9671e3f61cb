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

from mpframe.data.datasets.detection.scenes import scenes
from mpframe.data.datasets.images.adversarial import adversarial, digits_gan
from mpframe.data.datasets.images.arrays import ArrayImages, Images, Normalize
from mpframe.data.datasets.images.cifar10 import cifar10
from mpframe.data.datasets.images.digits import digits
from mpframe.data.datasets.images.fashion_mnist import fashion_mnist
from mpframe.data.datasets.images.image_folder import image_folder
from mpframe.data.datasets.segmentation.mask_folder import mask_folder
from mpframe.data.datasets.segmentation.shapes import shapes
from mpframe.data.datasets.segmentation.task import segmentation
from mpframe.data.datasets.speech.phonemes import phonemes
from mpframe.data.datasets.tabular.csv_table import csv_table
from mpframe.data.datasets.text.next_token import next_token
from mpframe.data.datasets.text.text_folder import text_folder
from mpframe.data.datasets.text.tweet_spans import tweet_spans
from mpframe.data.loader import Loader
from mpframe.data.metrics import (
    RMSE,
    RMSPE,
    Accuracy,
    BitsPerByte,
    Dice,
    IoU,
    LabelErrorRate,
    MeanAveragePrecision,
    Perplexity,
    WordJaccard,
)
from mpframe.data.task import Metric, Task, classification

__all__ = [
    "RMSE",
    "RMSPE",
    "Accuracy",
    "ArrayImages",
    "BitsPerByte",
    "Dice",
    "Images",
    "IoU",
    "LabelErrorRate",
    "Loader",
    "MeanAveragePrecision",
    "Metric",
    "Normalize",
    "Perplexity",
    "Task",
    "WordJaccard",
    "adversarial",
    "cifar10",
    "classification",
    "csv_table",
    "digits",
    "digits_gan",
    "fashion_mnist",
    "image_folder",
    "mask_folder",
    "next_token",
    "phonemes",
    "scenes",
    "segmentation",
    "shapes",
    "text_folder",
    "tweet_spans",
]
