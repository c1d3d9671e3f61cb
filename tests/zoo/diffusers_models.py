"""diffusers' building blocks at a few channels: U-Nets, autoencoders, transformers, controls."""

from typing import Any

import torch
from comparison import Example, called, images, noise, row

TEXT, WIDTH = 8, 32  # tokens of a prompt and their width


def names() -> list[str]:
    return sorted(MODELS)


def build(name: str) -> Example:
    import diffusers

    options, named = MODELS[name]
    torch.manual_seed(0)
    return called(getattr(diffusers, name)(**options).train(), **named)


_STEP, _PROMPT = torch.tensor([3, 7]), noise(2, TEXT, WIDTH)
_PROMPTED: dict[str, Any] = {"timestep": _STEP, "encoder_hidden_states": _PROMPT}
_IMAGE = images(16, channels=4)
_HEADS: dict[str, Any] = row(num_attention_heads=2, attention_head_dim=16, num_layers=2)
_UNET: dict[str, Any] = row(block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8)
# By class, what makes it small and what it is called with.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": (
        row(sample_size=16, attention_head_dim=8, **_UNET,
             down_block_types=("DownBlock2D", "AttnDownBlock2D"),
             up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        row(sample=images(16), timestep=_STEP),
    ),
    "UNet2DConditionModel": (
        row(sample_size=16, cross_attention_dim=WIDTH, attention_head_dim=8, **_UNET,
             down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
             up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
        row(sample=_IMAGE, **_PROMPTED),
    ),
    "ControlNetModel": (
        row(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=WIDTH,
             attention_head_dim=8, conditioning_embedding_out_channels=(8, 16), **_UNET),
        row(sample=_IMAGE, controlnet_cond=images(32), **_PROMPTED),
    ),
    "AutoencoderKL": (
        row(block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1,
             down_block_types=("DownEncoderBlock2D",) * 2,
             up_block_types=("UpDecoderBlock2D",) * 2),
        row(sample=images(16)),
    ),
    "FluxTransformer2DModel": (
        row(in_channels=4, num_single_layers=1, joint_attention_dim=WIDTH,
             pooled_projection_dim=WIDTH, axes_dims_rope=(4, 4, 8), **_HEADS),
        row(hidden_states=noise(2, 16, 4), img_ids=torch.zeros(16, 3),
             txt_ids=torch.zeros(TEXT, 3), timestep=_STEP / 10, encoder_hidden_states=_PROMPT,
             pooled_projections=_PROMPT[:, 0]),
    ),
    "WanTransformer3DModel": (
        row(text_dim=WIDTH, freq_dim=16, ffn_dim=64, cross_attn_norm=True, in_channels=4,
             out_channels=4, **_HEADS),
        row(hidden_states=noise(2, 4, 2, 8, 8), **_PROMPTED),
    ),
}  # fmt: skip
