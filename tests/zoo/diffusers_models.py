"""diffusers' building blocks at a few channels: U-Nets, autoencoders, transformers, controls."""

from typing import Any

import torch
from example import Example, images
from torch import Tensor

TEXT, WIDTH = 8, 32  # tokens of a prompt and their width


def names() -> list[str]:
    """The classes that this file knows how to make small."""
    return sorted(MODELS)


def build(name: str) -> Example:
    """A model of this class in training mode, with a batch of two."""
    import diffusers

    options, named = MODELS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**options).train()
    recompute = None
    if model._supports_gradient_checkpointing:
        recompute = type(model).enable_gradient_checkpointing
    return Example(model, named=named, recompute=recompute)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


_STEP = torch.tensor([3, 7])
_PROMPT = _noise(2, TEXT, WIDTH)
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_UNET: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
_VAE: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 8,
}
_CROSS: dict[str, Any] = {
    "sample_size": 16,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 8,
    **_UNET,
}

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": (
        {
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
            **_UNET,
        },
        {"sample": images(16), "timestep": _STEP},
    ),
    "UNet2DConditionModel": (
        _CROSS,
        {"sample": images(16, channels=4), "timestep": _STEP, "encoder_hidden_states": _PROMPT},
    ),
    "UNet3DConditionModel": (
        {
            **_CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {
            "sample": _noise(2, 4, 4, 16, 16),
            "timestep": _STEP,
            "encoder_hidden_states": _PROMPT,
        },
    ),
    "ControlNetModel": (
        {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 8,
            "conditioning_embedding_out_channels": (8, 16),
            **_UNET,
        },
        {
            "sample": images(16, channels=4),
            "timestep": _STEP,
            "encoder_hidden_states": _PROMPT,
            "controlnet_cond": images(32),
        },
    ),
    "AutoencoderKL": ({**_VAE, "layers_per_block": 1}, {"sample": images(16)}),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        {"sample": images(16)},
    ),
    "VQModel": ({**_VAE, "num_vq_embeddings": 16}, {"sample": images(16)}),
    "Transformer2DModel": (
        {
            "in_channels": 32,
            "norm_num_groups": 8,
            "cross_attention_dim": WIDTH,
            **_HEADS,
        },
        {"hidden_states": images(8, channels=32), "encoder_hidden_states": _PROMPT},
    ),
    "DiTTransformer2DModel": (
        {"in_channels": 4, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10, **_HEADS},
        {
            "hidden_states": images(8, channels=4),
            "timestep": _STEP,
            "class_labels": torch.tensor([1, 2]),
        },
    ),
    "PixArtTransformer2DModel": (
        {
            "in_channels": 4,
            "out_channels": 8,
            "sample_size": 8,
            "cross_attention_dim": WIDTH,
            "caption_channels": WIDTH,
            "use_additional_conditions": False,
            **_HEADS,
        },
        {
            "hidden_states": images(8, channels=4),
            "encoder_hidden_states": _PROMPT,
            "timestep": _STEP,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": 32,
            "pooled_projection_dim": WIDTH,
            **_HEADS,
        },
        {
            "hidden_states": images(8, channels=4),
            "encoder_hidden_states": _PROMPT,
            "pooled_projections": _PROMPT[:, 0],
            "timestep": _STEP,
        },
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4,
            "num_single_layers": 1,
            "joint_attention_dim": WIDTH,
            "pooled_projection_dim": WIDTH,
            "axes_dims_rope": (4, 4, 8),
            **_HEADS,
        },
        {
            "hidden_states": _noise(2, 16, 4),
            "encoder_hidden_states": _PROMPT,
            "pooled_projections": _PROMPT[:, 0],
            "timestep": _STEP / 10,
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(TEXT, 3),
        },
    ),
    "PriorTransformer": (
        {"embedding_dim": WIDTH, "num_embeddings": TEXT, "additional_embeddings": 4, **_HEADS},
        {
            "hidden_states": _noise(2, WIDTH),
            "timestep": _STEP,
            "proj_embedding": _noise(2, WIDTH),
            "encoder_hidden_states": _PROMPT,
        },
    ),
    "WanTransformer3DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": WIDTH,
            "freq_dim": 16,
            "ffn_dim": 64,
            "cross_attn_norm": True,
            **_HEADS,
        },
        {
            "hidden_states": _noise(2, 4, 2, 8, 8),
            "timestep": _STEP,
            "encoder_hidden_states": _PROMPT,
        },
    ),
    "LTXVideoTransformer3DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "caption_channels": WIDTH,
            **_HEADS,
        },
        {
            "hidden_states": _noise(2, 2 * 4 * 4, 4),
            "encoder_hidden_states": _PROMPT,
            "timestep": _STEP,
            "encoder_attention_mask": torch.ones(2, TEXT),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        {
            "hidden_states": images(8, channels=4),
            "encoder_hidden_states": _PROMPT,
            "timestep": _STEP / 10,
        },
    ),
    "CogVideoXTransformer3DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": WIDTH,
            "time_embed_dim": 8,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": TEXT,
            **_HEADS,
        },
        {
            "hidden_states": _noise(2, 2, 4, 8, 8),
            "encoder_hidden_states": _PROMPT,
            "timestep": _STEP,
        },
    ),
}
