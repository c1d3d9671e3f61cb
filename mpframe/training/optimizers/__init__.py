"""What goes beyond one optimizer over one loss, written over the core's public parts.

Several optimizers that step together (multi_optimizer), several losses (multi_objective), LBFGS,
which evaluates the loss itself (lbfgs), and which parameters a group of an optimizer takes
(selection).
"""
