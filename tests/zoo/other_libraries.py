"""A small model of each library whose habits once broke a cast or a master here: README.md."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from example import Example, noise
from torch import Tensor, nn

STEPS = 20
_trained = partial(Example, steps=STEPS, traced=True)


class _Net(nn.Module):
    """Modules by their names, and forward(net, *inputs)."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._called = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._called(self, *inputs)


def _tokens(*shape: int, top: int = 32, seed: int = 6) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed))


def rotary_embedding_torch() -> Example:
    from rotary_embedding_torch import RotaryEmbedding

    def forward(net: Any, x: Tensor) -> Tensor:
        parts = net.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        q, k = (net.rotary.rotate_queries_or_keys(part) for part in parts[:2])
        mixed = F.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
        return net.out(mixed.transpose(1, 2).flatten(2))

    rotary = RotaryEmbedding(dim=8)
    net = _Net(forward, rotary=rotary, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))
    inputs, wanted = noise(STEPS, 2, 16, 32), noise(STEPS, 2, 16, 32, seed=5)
    return _trained(net, lambda m, step: F.mse_loss(m(inputs[step]).float(), wanted[step]))


def x_transformers() -> Example:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True)
    inner = TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers)
    tokens = _tokens(STEPS, 2, 16)
    return _trained(AutoregressiveWrapper(inner), lambda m, step: m(tokens[step]))


def lightly() -> Example:
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models import modules, utils

    def forward(net: Any, view: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = net.teacher(other)
        return loss(net.prediction(net.projection(net.backbone(view))), wanted)

    def move(model: Any) -> None:
        utils.update_momentum(model.backbone, model.teacher[0], m=0.99)
        utils.update_momentum(model.projection, model.teacher[1], m=0.99)

    loss = NegativeCosineSimilarity()
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU())
    projection = modules.BYOLProjectionHead(32, 32, 16)
    prediction = modules.BYOLPredictionHead(16, 32, 16)
    teacher = deepcopy(nn.Sequential(backbone, projection))
    utils.deactivate_requires_grad(teacher)
    net = _Net(
        forward, backbone=backbone, projection=projection, prediction=prediction, teacher=teacher
    )
    views, others = noise(STEPS, 16, 3, 8, 8), noise(STEPS, 16, 3, 8, 8, seed=5)
    return _trained(net, lambda m, step: m(views[step], others[step]), after_step=move)


def pytorch_metric_learning() -> Example:
    from pytorch_metric_learning.losses import ArcFaceLoss

    net = _Net(
        lambda net, x, labels: net.head(net.body(x), labels),
        body=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)),
        head=ArcFaceLoss(num_classes=4, embedding_size=16),
    )
    inputs, labels = noise(STEPS, 16, 16), _tokens(STEPS, 16, top=4)
    return _trained(net, lambda m, step: m(inputs[step], labels[step]))


def peft() -> Example:
    from peft import LoraConfig, get_peft_model

    case = transformers()
    options = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return replace(case, model=get_peft_model(case.model, options))


def transformers() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0,
    )  # fmt: skip
    tokens = _tokens(STEPS, 2, 64)
    # Far along the text, where positions in half would be off by whole turns.
    places = torch.arange(900, 964).expand(2, -1)
    return _trained(
        LlamaForCausalLM(options).train(),
        lambda m, step: m(tokens[step], position_ids=places, labels=tokens[step]).loss,
    )


def gpytorch() -> Example:
    """A Gaussian process over the features of a network: deep kernel learning."""
    import gpytorch as gp

    class Process(gp.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            points = torch.linspace(-2, 2, 8).unsqueeze(-1)
            distribution = gp.variational.CholeskyVariationalDistribution(8)
            super().__init__(gp.variational.VariationalStrategy(self, points, distribution))
            self.mean_module = gp.means.ConstantMean()
            self.covariance = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gp.distributions.MultivariateNormal(self.mean_module(x), self.covariance(x))

    def forward(net: Any, x: Tensor) -> Tensor:
        features = net.features(x)
        bound = gp.mlls.VariationalELBO(net.likelihood, net.process, num_data=64)
        with torch.autocast("cpu", enabled=False):  # A factorisation in half may not exist.
            return -bound(net.process(features.float()), x.sum(-1).sin())

    features = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    likelihood = gp.likelihoods.GaussianLikelihood()
    net = _Net(forward, features=features, process=Process(), likelihood=likelihood)
    inputs = noise(STEPS, 32, 4)
    return _trained(net, lambda m, step: m(inputs[step]))


LIBRARIES = {
    make.__name__: make
    for make in (
        *(rotary_embedding_torch, x_transformers, lightly, pytorch_metric_learning),
        *(peft, transformers, gpytorch),
    )
}
