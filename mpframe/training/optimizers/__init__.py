"""Several optimizers, and which weights each takes, over the core's public parts."""
