"""The models of a benchmark that the other commands do not load: shapes with random weights, DFlash drafters."""

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from ..cost_model.shapes import random_model, shape_config
from ..model.modeling_d3d import D3DDrafterForCausalLM


SHAPE_PREFIX = "shape:"
_DFLASH_SETTINGS = ("block_size", "mask_token_id", "target_layer_ids")


def is_shape(name: str | None) -> bool:
    return name is not None and name.startswith(SHAPE_PREFIX)


def parse_shape(name: str) -> PreTrainedConfig:
    """
    Args:
        name (`str`): `shape:NAME`, `shape:NAME:LAYERS` for another depth, `shape:NAME:tiny` for trying out.

    Raises:
        ValueError: There is no such shape, or something else follows it.
    """
    shape, *details = name.removeprefix(SHAPE_PREFIX).split(":")
    num_layers, tiny = None, False
    for detail in details:
        if detail == "tiny":
            tiny = True
        elif detail.isdecimal():
            num_layers = int(detail)
        else:
            raise ValueError(f"{name!r} ends in {detail!r}: give a number of layers, or tiny.")
    return shape_config(shape, num_layers, tiny)


def random_target(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A target with random weights."""
    return random_model(config, dtype, device)


def random_drafter(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, vocab_size: int, block_size: int
) -> D3DDrafterForCausalLM:
    """A drafter with random weights, for a target's vocabulary."""
    model = random_model(config, dtype, device, seed=1)
    with device:
        return D3DDrafterForCausalLM.from_backbone(model, block_size=block_size, vocab_size=vocab_size).eval()


def load_dflash(
    name_or_path: str, target: PreTrainedModel, dtype: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """
    A DFlash drafter for transformers' own loop (`speculation_type="dflash"`): a model that `AutoModel` loads, whose
    config says `block_size`, `mask_token_id` and the `target_layer_ids` whose hidden states it reads.

    Args:
        name_or_path (`str`): Folder or Hub name.
        target (`PreTrainedModel`): The model that it drafts for.
        dtype (`str`, *optional*, defaults to `"auto"`): As in `from_pretrained`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether it may bring code of its own.

    Raises:
        ValueError: It is no DFlash drafter, or one of another target.
        OSError: It cannot be found.
    """
    model = AutoModel.from_pretrained(name_or_path, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    missing = [name for name in _DFLASH_SETTINGS if getattr(model.config, name, None) is None]
    if missing:
        raise ValueError(
            f"{name_or_path!r} is no DFlash drafter: its config has no {', '.join(missing)}; give one that was "
            "trained for the target."
        )
    text = target.config.get_text_config(decoder=True)
    given, deepest = model.config.hidden_size, max(model.config.target_layer_ids)
    if given != text.hidden_size or deepest >= text.num_hidden_layers or model.config.mask_token_id >= text.vocab_size:
        raise ValueError(
            f"{name_or_path!r} drafts for another target: it has a hidden size of {given}, reads layer {deepest} and "
            f"masks with token {model.config.mask_token_id}, and the target has a hidden size of {text.hidden_size}, "
            f"{text.num_hidden_layers} layers and {text.vocab_size} tokens."
        )
    return model.to(target.device)


__all__ = [
    "SHAPE_PREFIX",
    "is_shape",
    "load_dflash",
    "parse_shape",
    "random_drafter",
    "random_target",
]
