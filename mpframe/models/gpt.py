"""A decoder-only transformer (GPT-2: Radford et al. 2019), which predicts each next token.

A block adds to its input, first by attention to the tokens up to here, then token by token:

    x = x + attention(norm(x))
    x = x + mlp(norm(x))

The logits are the products with the token embedding's own rows (tied weights). Initial weights are
GPT-2's: N(0, 0.02²), biases 0, and N(0, (0.02 / sqrt(2 depth))²) for the two layers of a block that
write into the sum, so that its variance does not grow with the depth.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mpframe.errors import ConfigError, DataError
from mpframe.models.checks import require_dropout, require_sizes

_STD = 0.02


class GPT(nn.Module):
    """Maps tokens [N, T] of int64 to logits [N, T, vocab_size]; those at t depend on 0 to t.

    Args:
        vocab_size: different tokens.
        context: most tokens it can be given, T <= context.
        depth: blocks.
        heads: of each attention.
        width: numbers per token; a multiple of `heads`.
        dropout: fraction dropped of embeddings, attention weights and what a block adds,
            0 <= dropout < 1.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self, vocab_size: int, context: int, depth: int, heads: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        require_sizes(vocab_size=vocab_size, context=context, depth=depth, heads=heads, width=width)
        require_dropout(dropout)
        if width % heads:
            raise ConfigError(f"model.width={width}: must be a multiple of model.heads={heads}")
        self.context = context
        self.token_embed = nn.Embedding(vocab_size, width)
        self.position_embed = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.token_embed.weight
        self._initialise(depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next token.

        Raises:
            DataError: there are more tokens than `context`.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise DataError(
                f"model: {length} tokens, and model.context is {self.context}; give it "
                f"{self.context} or fewer"
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token_embed(tokens) + self.position_embed(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def _initialise(self, depth: int) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=_STD / math.sqrt(2 * depth) if adds else _STD)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.mlp = nn.Sequential()
        self.mlp.add_module("up", nn.Linear(width, 4 * width))
        self.mlp.add_module("gelu", nn.GELU(approximate="tanh"))
        self.mlp.add_module("down", nn.Linear(4 * width, width))
        self.mlp.add_module("dropout", nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._by_head(part) for part in self.qkv(x).chunk(3, dim=-1))
        rate = self.dropout.p if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        out: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """[N, T, width] as [N, heads, T, width / heads]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


def gpt(
    vocab_size: int,
    context: int,
    depth: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.0,
) -> nn.Module:
    """A `GPT`; the default sizes are those of GPT-2 small."""
    return GPT(vocab_size, context, depth, heads, width, dropout)
