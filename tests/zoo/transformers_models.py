"""transformers' architectures, each from its default configuration made tiny.

Most configurations name their sizes with the same words, so one table of small values makes most
models small, sub-configurations included. Which inputs a model wants is read from its signature.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from comparison import Example, NotBuiltError, called, images, loss_of, noise
from torch import Tensor, nn

TOKENS, LENGTH, SIDE = 99, 16, 32
LARGEST = 30_000_000  # parameters; more than that is a size that the table below did not reach

# The first pattern that matches an option's name decides.
SMALL: tuple[tuple[str, int], ...] = (
    (r".*(vocab_size|vocab_size_\w+|vocabulary_size)", TOKENS),
    (r"(num_)?(key_value|kv)_heads|num_key_value_heads|.*num_kv_heads|multi_query_num", 2),
    (r".*(_heads|n_head|nhead|num_heads)", 2),
    (r"head_dim|.*_head_dim|d_kv|kv_channels|attention_head_size", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|mlp_dim|n_inner|ffn_hidden_size|d_inner)", 64),
    (r"(num_)?(encoder|decoder)?_?n?_?(hidden_)?layers?|.*(num_|n_)\w*layers?|depth|num_blocks", 2),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|emb_dim)", 32),
    (r"(\w*_)?(projection_dim|proj_dim|output_dim|word_embed_proj_dim|conv_dim|neck_hidden)", 32),
    (r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_source_positions)", 64),
    (r"max_target_positions|max_2d_position_embeddings", 64),
    (r"image_size|img_size|input_image_size", SIDE),
    (r"patch_size", 8),
    (r"num_frames", 4),
    (r"(num_|n_)(local_|routed_)?experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k", 2),
    (r"n_group|topk_group", 1),
    (r"num_queries|query_length|num_query_tokens", 8),
    (r"q_lora_rank|kv_lora_rank|qk_nope_head_dim|qk_rope_head_dim|v_head_dim", 16),
    (r"(mamba_)?(d_state|state_size|ssm_state_size)", 8),
    (r"num_conv_pos_embeddings", 4),
    (r"num_mel_bins|num_mels", 16),
)
TOKEN_IDS = re.compile(r"(\w+_)?(token_id|token_index)")
NO_CHANCE = re.compile(r".*(dropout|drop_path_rate|drop_rate|layerdrop|drop|dropout_p)(_\w+)?")
STAGES = {"depths", "num_blocks_per_stage", "decoder_depths"}  # how many blocks each stage has
KEPT = {"layer_types", "torch_dtype", "dtype", "model_type", "transformers_version"}


def names() -> list[str]:
    """Every model type of the installed transformers that has a model of its own."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def build(name: str) -> Example:
    """The first of the model's classes that can be built small and gives a loss."""
    reasons = []
    for kind in _classes(name):
        try:
            return _example(kind, name)
        except Exception as error:
            reasons.append(f"{kind.__name__}: {type(error).__name__}: {error}")
    raise NotBuiltError("; ".join(reasons) or "no class")


def _classes(name: str) -> Iterator[type[nn.Module]]:
    """Classes with a head, which have losses of their own, before the bare model."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    seen = set()
    for task in ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CTC", "IMAGE_CLASSIFICATION"):
        found = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(name)
        found = found[0] if isinstance(found, tuple) else found
        if found not in (None, *seen):
            seen.add(found)
            yield getattr(transformers, found)
    bare = auto.MODEL_MAPPING_NAMES[name]
    yield getattr(transformers, bare if isinstance(bare, str) else bare[-1])


def _example(kind: Any, name: str) -> Example:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = kind.config_class or CONFIG_MAPPING[name]
    config = config_class(**_shrunk(config_class()))
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > LARGEST:
        raise NotBuiltError(f"{size} parameters")
    torch.manual_seed(0)
    model = kind(config).float().train()
    named = _inputs(model)
    for labels in ({"labels": _tokens(model)}, {}):
        try:
            if loss_of(model(**named, **labels)).isfinite():
                return called(model, **named, **labels)
        except Exception as error:
            refusal = error
    raise refusal


def _shrunk(config: Any) -> dict[str, Any]:
    changed: dict[str, Any] = {"use_cache": False}
    for option, value in vars(config).items():
        small = _small(option, value)
        if small is not None and option not in KEPT and not option.startswith("_"):
            changed[option] = small
    for option in config.sub_configs:
        inner = getattr(config, option, None)
        if inner is not None and hasattr(inner, "sub_configs"):
            changed[option] = {**_shrunk(inner), "model_type": inner.model_type}
    return changed


def _small(option: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return None
    if TOKEN_IDS.fullmatch(option) and isinstance(value, int):
        return value if 0 <= value < TOKENS else 3 + sum(map(ord, option)) % (TOKENS - 3)
    if NO_CHANCE.fullmatch(option) and isinstance(value, float):
        return 0.0
    for pattern, small in SMALL:
        if re.fullmatch(pattern, option):
            return min(value, small) if isinstance(value, int) and value > 0 else None
    if option in STAGES and isinstance(value, list | tuple):
        return [1 for _ in value]
    if option == "rope_parameters" and "mrope_section" in value:
        return {**value, "mrope_section": [2, 3, 3]}  # together half of head_dim
    return None


def _tokens(model: Any) -> Tensor:
    config = model.config.get_text_config()
    high = min(TOKENS, getattr(config, "vocab_size", None) or TOKENS)
    high = min(high, getattr(model.config, "num_labels", high)) if _classifies(model) else high
    shape = (2,) if _classifies(model) else (2, LENGTH)
    random = torch.Generator().manual_seed(2)
    return torch.randint(3 if high > 4 else 0, high, shape, generator=random)


def _classifies(model: Any) -> bool:
    return "Classification" in type(model).__name__


def _inputs(model: Any) -> dict[str, Any]:
    """What the forward pass of `model` cannot do without, by its names."""
    wanted = inspect.signature(model.forward).parameters
    main = model.main_input_name
    makers = {"pixel_values": _pixels, "input_features": _features, "input_values": _waves}
    if main not in {"input_ids", *makers}:
        raise NotBuiltError(f"its main input is {main}")
    named = {main: makers[main](model.config) if main in makers else None}
    if main == "input_ids" and not _classifies(model):
        named[main] = _tokens(model)
    if "decoder_input_ids" in wanted:
        named["decoder_input_ids"] = _tokens(model)
    if "bbox" in wanted and main == "input_ids":
        named["bbox"] = torch.tensor([1, 2, 5, 9]).expand(2, LENGTH, 4)
    if "return_loss" in wanted:
        named["return_loss"] = True
        if "input_ids" in wanted and "pixel_values" in wanted:
            named["input_ids"] = _tokens(model)
            named["pixel_values"] = _pixels(model.config)
    return named


def _pixels(config: Any) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", SIDE)
    size = size if isinstance(size, int) else SIDE
    pixels = images(size, channels=getattr(vision, "num_channels", 3))
    frames = getattr(vision, "num_frames", None)
    return pixels if frames is None else pixels[:, None].repeat(1, frames, 1, 1, 1)


def _features(config: Any) -> Tensor:
    bins = getattr(config, "num_mel_bins", getattr(config, "feature_size", 16))
    positions = getattr(config, "max_source_positions", None)
    if positions is not None and config.model_type == "whisper":
        return noise(2, bins, 2 * positions, seed=3)
    return noise(2, 64, bins, seed=3)


def _waves(config: Any) -> Tensor:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return noise(2, config.max_length, config.num_mel_bins, seed=3)
    return noise(2, 1600, seed=3)
