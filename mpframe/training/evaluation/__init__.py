"""A validation: its loss and metrics, the best one so far, and a model's outputs as a table.

evaluator     runs a trainer's model over the data
evaluation    the result, `Evaluation`; the metrics of one validation, a user's own among them
best          the best validation so far, and whether the last one is much worse
prediction    takes the place of a metric, and writes each sample's outputs
"""

from mpframe.training.evaluation.evaluation import LOSS, Evaluation, Metrics, NamedMetric
from mpframe.training.evaluation.evaluator import Evaluator

__all__ = ["LOSS", "Evaluation", "Evaluator", "Metrics", "NamedMetric"]
