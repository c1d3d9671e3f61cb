"""The GPT: GPT-2's numbers, its initialisation, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpframe.core.errors import ConfigError, DataError
from mpframe.workloads.text.language_model import GPT

SIZES: dict[str, Any] = {"vocab_size": 11, "context": 8, "depth": 2, "heads": 2, "width": 16}


def made(**changed: Any) -> Any:
    torch.manual_seed(0)
    return GPT(**{**SIZES, **changed})


def test_its_numbers_are_those_of_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_layer=2, n_head=2, n_embd=16, use_cache=False
    )
    reference, own = transformers.GPT2LMHeadModel(config).eval(), made().eval()
    own.load_state_dict(_renamed(reference.state_dict()))
    tokens = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(1))
    # The same sums in another order: a few roundings of numbers of about 1.
    torch.testing.assert_close(own(tokens), reference(tokens).logits, rtol=0, atol=2e-6)


NAMES = {
    "transformer.wte": "token_embed",
    "transformer.wpe": "position_embed",
    "transformer.h": "blocks",
    "transformer.ln_f": "norm",
    "lm_head": "head",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}


def _renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2's weights under our names; its layers keep their matrices transposed."""
    renamed = {}
    for name, weight in state.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        layer = ".".join(name.split(".")[-3:-1])
        turned = layer in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        renamed[name] = weight.T if turned and weight.dim() == 2 else weight
    return renamed


def test_a_logit_depends_on_no_later_token() -> None:
    net = made().eval()
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 10
    before, after = net(tokens), net(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_the_head_is_the_embedding() -> None:
    net = made()
    assert net.head.weight is net.token_embed.weight
    names = [name for name, _ in net.named_parameters()]
    assert "token_embed.weight" in names
    assert "head.weight" not in names


def test_the_initialisation_is_that_of_gpt2() -> None:
    net = made(width=256, depth=8)
    for name, weight in net.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(weight, torch.zeros_like(weight)), name
        elif weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            std = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
            # Of n normal numbers the deviation is off by about std / sqrt(2 n): five times that.
            off = 5 * std / math.sqrt(2 * weight.numel())
            assert weight.std().item() == pytest.approx(std, abs=off), name


def test_size_of_gpt2_small() -> None:
    with torch.device("meta"):
        net = GPT(vocab_size=50257, context=1024)
    assert sum(weight.numel() for weight in net.parameters()) == 124_439_808


def test_dropout_acts_in_training_only() -> None:
    net, tokens = made(dropout=0.5), torch.arange(8).view(1, 8)
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))
    without = [m.p for m in made().modules() if isinstance(m, nn.Dropout)]
    assert set(without) == {0.0}


def test_shorter_windows_are_taken_and_longer_ones_refused() -> None:
    net = made()
    assert net(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 11)
    with pytest.raises(DataError, match=r"^model: 9 tokens, and model.context is 8; give it 8"):
        net(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"depth": 0}, "model.depth=0: must be a whole number >= 1"),
        ({"heads": 3}, "model.width=16: must be a multiple of model.heads=3"),
        ({"dropout": 1.0}, "model.dropout=1.0: must be >= 0 and < 1"),
    ],
)
def test_sizes_out_of_range_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(**changed)
    assert str(error.value) == message
