"""A small model of each library whose habits once broke a cast or a master here: README.md."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from comparison import Example, noise
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


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(6))


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


_MADE = rotary_embedding_torch, x_transformers, lightly, peft, transformers
LIBRARIES = {make.__name__: make for make in _MADE}
