"""Trainers whose step is another one: with the verbs of `StepTrainer`, over its public parts.

    compiled_step, step_record   the whole step as one graph, and what it reads and writes
    multi_objective              several losses, each with weights and a scaler of its own
    lbfgs                        a step whose optimizer asks for the loss again

run/trainer.py chooses among them.
"""
