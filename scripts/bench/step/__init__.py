"""A train step of a model, by hand and by the trainer, in every dtype mode.

workloads.py has the models, competitors.py the steps, laps.py what divides the time of a step into
forward, backward and update, one_turn.py takes one turn in a new process. groups/steps.py
races them.
"""
