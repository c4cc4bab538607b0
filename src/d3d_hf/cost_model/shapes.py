"""Models of well-known shapes with random weights: for timing, where the weights matter little, without downloads."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config


@dataclass(frozen=True)
class _Shape:
    config_class: type
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float


# The published config.json of each.
_SHAPES = {
    "qwen3-1.7b": _Shape(Qwen3Config, 2048, 6144, 28, 16, 8, 128, 151_936, True, 40_960, 1e6, 1e-6),
    "qwen3-8b": _Shape(Qwen3Config, 4096, 12_288, 36, 32, 8, 128, 151_936, False, 40_960, 1e6, 1e-6),
    "qwen3-32b": _Shape(Qwen3Config, 5120, 25_600, 64, 64, 8, 128, 151_936, False, 40_960, 1e6, 1e-6),
    "smollm2-135m": _Shape(LlamaConfig, 576, 1536, 30, 9, 3, 64, 49_152, True, 8192, 1e5, 1e-5),
    "smollm2-360m": _Shape(LlamaConfig, 960, 2560, 32, 15, 5, 64, 49_152, True, 8192, 1e5, 1e-5),
    "smollm2-1.7b": _Shape(LlamaConfig, 2048, 8192, 24, 32, 32, 64, 49_152, True, 8192, 1.3e5, 1e-5),
}
SHAPE_NAMES = tuple(_SHAPES)
# Of a tiny variant; query heads per key head, tied embeddings and RoPE stay what they are.
_TINY = {"intermediate_size": 96, "head_dim": 16, "vocab_size": 256}
_TINY_LAYERS, _TINY_KV_HEADS = 2, 2


def shape_config(name: str, num_layers: int | None = None, tiny: bool = False) -> PreTrainedConfig:
    """
    The config of a model of known shape. It names no special tokens, so that generation runs to its full length.

    Args:
        name (`str`): One of `SHAPE_NAMES`.
        num_layers (`int`, *optional*): Layers, if not as many as published.
        tiny (`bool`, *optional*, defaults to `False`): Two narrow layers of the same architecture, for trying out.

    Raises:
        ValueError: Another name, or less than one layer.
    """
    if name not in _SHAPES:
        raise ValueError(f"The shape is {name!r}: choose one of {', '.join(SHAPE_NAMES)}.")
    if num_layers is not None and num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}: give at least 1.")
    values = dict(vars(_SHAPES[name]))
    config_class, rope_theta = values.pop("config_class"), values.pop("rope_theta")
    if tiny:
        num_heads = values["num_attention_heads"] // values["num_key_value_heads"] * _TINY_KV_HEADS
        values.update(_TINY, num_hidden_layers=_TINY_LAYERS, num_key_value_heads=_TINY_KV_HEADS)
        values.update(num_attention_heads=num_heads, hidden_size=num_heads * _TINY["head_dim"])
    if num_layers is not None:
        values["num_hidden_layers"] = num_layers
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    return config_class(**values, rope_parameters=rope, bos_token_id=None, eos_token_id=None, pad_token_id=0)


def random_model(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """
    A causal language model with random weights, made where it is to run: no copy of it exists elsewhere.

    Args:
        config (`PreTrainedConfig`): Its config; not modified.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`): Of the weights.
        device (`torch.device`, *optional*, defaults to `"cpu"`): Where.
        seed (`int`, *optional*, defaults to 0): Of the weights; the global seeds are left alone.
        attn_implementation (`str`, *optional*, defaults to `"sdpa"`): As in `from_pretrained`.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    return model.eval()


__all__ = ["SHAPE_NAMES", "random_model", "shape_config"]
