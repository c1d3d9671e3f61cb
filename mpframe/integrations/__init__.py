"""mpframe's precision in other trainers: Lightning, Accelerate, Hugging Face's Trainer.

Each is imported by its own name and needs its package: `pip install mpframe[integrations]`. They
use nothing but the public parts of the core: `Precision`, `MasterWeights` and a loss scaler.
"""
