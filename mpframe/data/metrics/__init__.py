"""Metrics that count on the device, one file each, in the manner of torchmetrics.

An `update` only queues work: the sums are 0-d tensors on the outputs' device, and nothing is read
back before `compute`. The sums start as the number 0, so that the first batch decides the device.
"""

from mpframe.data.metrics.accuracy import Accuracy
from mpframe.data.metrics.bits_per_byte import BitsPerByte
from mpframe.data.metrics.dice import Dice
from mpframe.data.metrics.iou import IoU
from mpframe.data.metrics.label_error_rate import LabelErrorRate
from mpframe.data.metrics.mean_average_precision import MeanAveragePrecision
from mpframe.data.metrics.perplexity import Perplexity
from mpframe.data.metrics.rmse import RMSE
from mpframe.data.metrics.rmspe import RMSPE
from mpframe.data.metrics.word_jaccard import WordJaccard

__all__ = [
    "RMSE",
    "RMSPE",
    "Accuracy",
    "BitsPerByte",
    "Dice",
    "IoU",
    "LabelErrorRate",
    "MeanAveragePrecision",
    "Perplexity",
    "WordJaccard",
]
