"""What a drafter must know about its backbone: whether it can be packed, where its layers are, how far it reaches."""

import copy
import inspect

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from .packing import attention_masks, lay_out, layer_windows


_PROBE_TOLERANCE = 1e-4
# Sizes of the probe's tiny copy. Fields that a config lacks are left alone.
_TINY_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 32,
    "vocab_size_per_layer_input": 32,
}
_ALIBI_MODEL_TYPES = ("bloom", "mpt")
# Config fields of models with one table for the inputs of all layers, or layers that read other layers' keys.
_TIES_BETWEEN_LAYERS = ("hidden_size_per_layer_input", "num_kv_shared_layers")


def cache_argument(model: nn.Module) -> str:
    """The keyword of the KV cache in the model's forward: `"cache"`, or `"past_key_values"` before 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_of(arguments: dict):
    """The KV cache among a call's keyword arguments: `cache` since transformers 5.24, `past_key_values` before."""
    cache = arguments.get("cache")
    return arguments.get("past_key_values") if cache is None else cache


def execution_device(model: nn.Module) -> torch.device:
    """The device that the model's first layer runs on, also where accelerate keeps the weights elsewhere meanwhile."""
    embedding = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if device is None:
        return embedding.weight.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """
    The decoder layers of a causal language model.

    Raises:
        ValueError: The base model has no `nn.ModuleList` of `num_hidden_layers` modules, or its layers share weights
            or keys, so that none can be left out.
    """
    for name in _TIES_BETWEEN_LAYERS:
        if value := getattr(model.config, name, None):
            raise ValueError(
                f"{type(model).__name__} has {name}={value}, which ties its layers to each other: pass "
                f"kept_layers=None, or a backbone of independent layers."
            )
    for child in model.base_model.children():
        if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers:
            return child
    raise ValueError(
        f"{type(model).__name__} has no list of {model.config.num_hidden_layers} decoder layers in its base model: "
        f"pass kept_layers=None, or a backbone whose layers stand in one nn.ModuleList."
    )


def resolve_kept_layers(kept_layers: int | list[int] | None, num_layers: int) -> list[int] | None:
    """
    Layer indices to keep: an `int` spreads that many evenly, first and last included.

    Raises:
        ValueError: Not between 1 and `num_layers` layers, or indices that repeat, descend or do not exist.
    """
    if kept_layers is None:
        return None
    if isinstance(kept_layers, int):
        if not 1 <= kept_layers <= num_layers:
            raise ValueError(f"kept_layers is {kept_layers}: keep between 1 and {num_layers} layers.")
        if kept_layers == 1:
            return [0]
        return [round(i * (num_layers - 1) / (kept_layers - 1)) for i in range(kept_layers)]
    indices = list(kept_layers)
    if not indices or sorted(set(indices)) != indices or indices[0] < 0 or indices[-1] >= num_layers:
        raise ValueError(
            f"kept_layers is {indices}: give ascending indices from 0 to {num_layers - 1}, each at most once."
        )
    return indices


def config_with_layers(config: PreTrainedConfig, indices: list[int]) -> PreTrainedConfig:
    """A copy of a backbone config with the layers at `indices` only; every per-layer list follows."""
    num_layers = config.num_hidden_layers
    reduced = copy.deepcopy(config)
    for name, value in vars(config).items():
        is_of_layers = name != "mlp_only_layers" and not name.endswith("_token_id")  # several EOS ids may be as many
        if isinstance(value, (list, tuple)) and len(value) == num_layers and is_of_layers:
            setattr(reduced, name, [value[i] for i in indices])
    if hasattr(config, "mlp_only_layers"):
        # Qwen-MoE names its dense layers by index, and every layer off the stride is dense too.
        stride, dense = getattr(config, "decoder_sparse_step", 1), set(config.mlp_only_layers or [])
        reduced.mlp_only_layers = [new for new, i in enumerate(indices) if i in dense or (i + 1) % stride]
        reduced.decoder_sparse_step = 1
    reduced.num_hidden_layers = len(indices)
    return reduced


def max_draft_positions(config: PreTrainedConfig) -> int | None:
    """
    Positions that the backbone can be trusted with, `None` if it names no bound. RoPE that rescales with the length
    ("dynamic", "longrope") changes the keys already cached, so such a backbone drafts only up to its original length.
    """
    limit = getattr(config, "max_position_embeddings", None)
    for rope in _rope_settings(config):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limit = rope.get("original_max_position_embeddings") or limit
    return limit


def rope_switch(config: PreTrainedConfig) -> tuple[int | None, bool]:
    """
    Where a target's RoPE begins to go by the length of the pass, drafted tokens included: the last length with
    ordinary RoPE (`None`: it never changes), and whether it is steady again beyond ("longrope" is, "dynamic" is not).
    """
    types = {rope.get("rope_type") for rope in _rope_settings(config)} & {"dynamic", "longrope"}
    return (max_draft_positions(config) if types else None), types == {"longrope"}


def _rope_settings(config: PreTrainedConfig) -> list[dict]:
    """The RoPE settings of a config: one dictionary, or one per layer type below it."""
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = getattr(config, "rope_scaling", None) or {}
    return [rope, scaling, *(part for part in rope.values() if isinstance(part, dict))]


def refuse_unpackable(config: PreTrainedConfig):
    """
    Refuses, by name, backbones whose attention cannot be packed.

    Raises:
        ValueError: Encoder-decoder, linear attention and hybrids, ALiBi, M-RoPE, unknown layer types.
    """
    name = config.model_type
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif name in _ALIBI_MODEL_TYPES or getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        reason = "its ALiBi biases go by storage index, not by position"
    elif any("mrope_section" in rope for rope in _rope_settings(config)):
        reason = "its M-RoPE takes three positions per token"
    elif not hasattr(config, "num_hidden_layers") or not hasattr(config, "vocab_size"):
        reason = "its config is not that of a plain decoder-only language model (take the language model out of it)"
    if reason is not None:
        raise ValueError(f"{name!r} cannot be the backbone of a D3D drafter: {reason}.")
    layer_windows(config)


def _tiny_copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy with the same architecture, one layer of each type and small sizes."""
    layer_types = getattr(config, "layer_types", None)
    indices = [0, *range(1, min(2, config.num_hidden_layers))]
    if layer_types is not None:
        indices = sorted({layer_types.index(kind) for kind in set(layer_types)} | {0})
    tiny = config_with_layers(config, indices)
    heads = getattr(config, "num_attention_heads", None)
    if heads is not None:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        tiny.num_attention_heads = 4
        if hasattr(config, "num_key_value_heads"):
            tiny.num_key_value_heads = 4 if kv_heads == heads else 2
    for name, size in _TINY_SIZES.items():
        is_derived = isinstance(getattr(type(config), name, None), property)
        if not is_derived and isinstance(getattr(config, name, None), int):
            setattr(tiny, name, size)
    if getattr(config, "sliding_window", None) is not None:
        tiny.sliding_window = 4
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)  # some configs refuse None
        if token is not None:
            setattr(tiny, name, [0] if isinstance(token, list) else 0)
    tiny._attn_implementation = "eager"
    return tiny


def _check_head(model: PreTrainedModel, embeds: torch.Tensor):
    """Packed passes run the base model and then the head alone: refuses a model that does not work that way."""
    outputs = []
    handle = model.base_model.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(inputs_embeds=embeds)
    handle.remove()
    if len(outputs) != 1 or getattr(outputs[0], "last_hidden_state", None) is None:
        raise ValueError(f"the head of {type(model).__name__} cannot be run apart from its layers")


@torch.no_grad()
def _probe(config: PreTrainedConfig) -> float:
    """Largest difference between the logits of one packed pass and those of its branches run alone."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        context_length, anchors, num_slots = 9, torch.tensor([[5, 8]]), (3, 3)
        width = model.get_input_embeddings().embedding_dim
        embeds = torch.randn(1, context_length + 6, width, dtype=torch.float32)
        _check_head(model, embeds)
        num_cached = 4
        key = cache_argument(model)
        cache = DynamicCache()
        model(inputs_embeds=embeds[:, :num_cached], use_cache=True, **{key: cache})
        layout = lay_out(context_length - num_cached, anchors, num_slots, num_cached=num_cached)
        packed = model(
            inputs_embeds=embeds[:, num_cached:],
            position_ids=layout.position_ids,
            attention_mask=attention_masks(layout, model.config, torch.float32),
            use_cache=True,
            **{key: cache},
        ).logits
        gap = 0.0
        for branch, anchor in enumerate(anchors[0].tolist()):
            first = context_length + 3 * branch
            alone = torch.cat([embeds[:, : anchor + 1], embeds[:, first : first + 3]], dim=1)
            one = lay_out(anchor + 1, torch.tensor([[anchor]]), (3,))
            masks = attention_masks(one, model.config, torch.float32)
            expected = model(inputs_embeds=alone, position_ids=one.position_ids, attention_mask=masks).logits[:, -3:]
            got = packed[:, first - num_cached : first - num_cached + 3]
            gap = max(gap, float((got - expected).abs().max()))
        plain = model(inputs_embeds=embeds[:, :context_length]).logits[:, num_cached:]
        return max(gap, float((packed[:, : context_length - num_cached] - plain).abs().max()))


def check_packable(config: PreTrainedConfig):
    """
    Tries packed against unpacked logits on a tiny random copy of the backbone.

    Raises:
        ValueError: The backbone cannot be packed, with the reason.
    """
    refuse_unpackable(config)
    try:
        gap = _probe(_tiny_copy(config))
    except Exception as error:
        raise ValueError(
            f"{config.model_type!r} cannot be the backbone of a D3D drafter: a tiny copy of it did not run with "
            f"packed masks ({type(error).__name__}: {error})."
        ) from error
    if not gap <= _PROBE_TOLERANCE:
        raise ValueError(
            f"{config.model_type!r} cannot be the backbone of a D3D drafter: its packed and unpacked logits differ by "
            f"{gap:.2g}, so its attention does not go by positions and masks alone."
        )


__all__ = [
    "cache_argument",
    "cache_of",
    "check_packable",
    "config_with_layers",
    "decoder_layers",
    "execution_device",
    "max_draft_positions",
    "refuse_unpackable",
    "resolve_kept_layers",
    "rope_switch",
]
