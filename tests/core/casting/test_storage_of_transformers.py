"""Which weights of Hugging Face's models are half in `mixed`, and that no number moves for it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vocabulary import HALVES

from mpframe import Precision

transformers = pytest.importorskip("transformers")

WORDS = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def mixtral(experts: str) -> nn.Module:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL))
    model.set_experts_implementation(experts)
    return model  # type: ignore[no-any-return]


def gpt_oss(experts: str) -> nn.Module:
    config = transformers.GptOssConfig(**SMALL, head_dim=8, sliding_window=4)
    model = transformers.GptOssForCausalLM(config)
    model.set_experts_implementation(experts)
    return model  # type: ignore[no-any-return]


# The weights that stay fp32 by their last name but for the norms: embeddings, and what is added.
ADDED = {"gate_up_proj_bias", "down_proj_bias", "sinks"}
CASES: list[Any] = [
    (gpt2, {"wte", "wpe"}),
    (lambda: mixtral("eager"), {"embed_tokens"}),
    (lambda: mixtral("grouped_mm"), {"embed_tokens"}),
    (lambda: gpt_oss("eager"), {"embed_tokens"} | ADDED),
    (lambda: gpt_oss("grouped_mm"), {"embed_tokens"} | ADDED),
]
IDS = ["gpt2", "mixtral", "mixtral-grouped", "gpt_oss", "gpt_oss-grouped"]


def gradients(model: nn.Module, precision: Precision) -> dict[str, Tensor]:
    torch.manual_seed(1)
    with precision.cast():
        loss = model(input_ids=WORDS, labels=WORDS).loss
    (loss * 8).backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("make", "stays"), CASES, ids=IDS)
def test_all_but_embeddings_norms_and_what_is_added(make: Any, stays: set[str], half: str) -> None:
    found = {}
    for mode in ("amp", "mixed"):
        torch.manual_seed(0)
        model = make().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision = Precision(mode, half, compute="emulated")
        model, _ = precision.prepare(model, optimizer, {"input_ids": WORDS, "labels": WORDS})
        found[mode] = gradients(model, precision)
    wide = [name for name, p in model.named_parameters() if p.dtype == torch.float32]
    others = [name for name in wide if "norm" not in name and ".ln_" not in name]
    assert {name.removesuffix(".weight").split(".")[-1] for name in others} == stays
    assert found["amp"].keys() == found["mixed"].keys()
    for name, gradient in found["amp"].items():
        assert torch.equal(gradient, found["mixed"][name]), name
