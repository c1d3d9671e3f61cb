"""A validation: its loss and metrics, the best one so far, and a model's outputs as a table.

    evaluation    the result, `Evaluation`; the metrics of one validation, a user's own among them
    best          the best validation so far, and whether the last one is much worse
    prediction    takes the place of a metric, and writes each sample's outputs

`Trainer.evaluate` in trainer.py runs the model over the data.
"""

from mpframe.training.evaluation.evaluation import LOSS, Evaluation, Metrics, NamedMetric

__all__ = ["LOSS", "Evaluation", "Metrics", "NamedMetric"]
