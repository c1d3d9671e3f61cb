"""mpframe's precision in other trainers, and its results in tracking services.

The trainers are Lightning, Accelerate and Hugging Face's: `pip install mpframe[integrations]`. They
use nothing but the public parts of the core: `Precision`, `MasterWeights` and a loss scaler. The
services are wandb, MLflow and Aim, each an extra of its name. Begin with tracking_service.py.
"""
