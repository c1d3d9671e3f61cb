"""Datasets as tasks (samples, loss, metric) and the loader that orders them reproducibly."""

from mpframe.data.datasets.adversarial import adversarial, digits_gan
from mpframe.data.datasets.cifar10 import cifar10
from mpframe.data.datasets.digits import digits
from mpframe.data.datasets.fashion_mnist import fashion_mnist
from mpframe.data.datasets.image_folder import image_folder
from mpframe.data.datasets.images import ArrayImages, Images, Normalize
from mpframe.data.loader import Loader
from mpframe.data.metrics import RMSE, Accuracy
from mpframe.data.task import Batch, Metric, Task, classification

__all__ = [
    "RMSE",
    "Accuracy",
    "ArrayImages",
    "Batch",
    "Images",
    "Loader",
    "Metric",
    "Normalize",
    "Task",
    "adversarial",
    "cifar10",
    "classification",
    "digits",
    "digits_gan",
    "fashion_mnist",
    "image_folder",
]
