"""What the process that forks the others has done before: imports, and one step of everything.

Importing a library and taking a first step each cost seconds; done here, no model pays for them.
"""

import importlib
from importlib.util import find_spec

import torch
from comparison import compare
from example import called
from torch import nn

SLOW = (
    *("timm", "diffusers.models", "torchvision_models", "transformers.loss.loss_utils"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto"),
    "transformers.models.auto.configuration_auto",
)

torch.set_num_threads(1)
for module in SLOW:
    if find_spec(module.split(".")[0]):
        importlib.import_module(module)
compare("warm", called(nn.Linear(2, 2), torch.ones(2, 2)))
