"""When a generation runs without drafts, and when it is refused.

What `generate` can do without a drafter it can do with one: where drafting is impossible the generation runs plain and
one warning says why. Errors are for calls that can never be right, and come before any work is done.
"""

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import (
    StaticCache,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


# Later releases verify on static caches too, as long as they can be cropped.
_STATIC_CACHES_ARE_REFUSED = Version(transformers.__version__) < Version("5.24")
# Built-in processors with a state of their own, which a call on a drafted prefix that is rejected would spoil.
_ONE_CALL_PER_TOKEN = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def check_call(drafter, target, model_kwargs: dict):
    """
    Refuses what a drafter can never do.

    Raises:
        ValueError: The target is an encoder-decoder model, or the text is given as `inputs_embeds`.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model, and a D3D drafter drafts for decoder-only targets: "
            f"call generate without assistant_model."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds was given, but a D3D drafter reads token ids: pass input_ids, or call generate without "
            "assistant_model."
        )


def reason_not_to_draft(drafter, input_ids, generation_config, model_kwargs: dict) -> str | None:
    """
    Why this generation should run without drafts, or `None` if it need not.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The model that would draft.
        input_ids (`torch.LongTensor` of shape `(batch, length)`): The prompt.
        generation_config (`GenerationConfig`): The call's, as prepared by transformers.
        model_kwargs (`dict`): The call's other arguments, KV cache and logits processors included.
    """
    if drafter.training:
        return "the drafter is in train mode (call drafter.eval())"
    if execution_device(drafter).type == "meta":
        return "the drafter is on the meta device (load its weights)"
    if input_ids.shape[0] > 1:
        return f"the batch size is {input_ids.shape[0]}, and transformers assists one sequence at a time"
    if not model_kwargs.get("use_cache", True) or generation_config.use_cache is False:
        return "use_cache is False, and a verification needs the target's cache"
    for processor in model_kwargs.get("logits_processor") or ():
        if isinstance(processor, _ONE_CALL_PER_TOKEN):
            return f"{type(processor).__name__} must be called once per token, which no assistant can promise"
    cache = cache_of(model_kwargs)
    if cache is None:
        return "the target keeps no cache that could be rolled back"
    if not getattr(cache, "is_croppable", True) or (isinstance(cache, StaticCache) and _STATIC_CACHES_ARE_REFUSED):
        return f"the target's cache, a {type(cache).__name__}, cannot be rolled back after a verification"
    if cache.get_seq_length() > 0:
        mask = model_kwargs.get("attention_mask")
        text_length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        if text_length != input_ids.shape[1]:
            return "past_key_values holds text that input_ids lacks (pass the whole text to have it drafted for)"
        if any(reaches_its_window(layer) for layer in cache.layers):
            return "past_key_values has sliding layers that have dropped keys (leave it out to have drafts)"
    return None


def cache_of(model_kwargs: dict):
    """The KV cache among a call's keyword arguments: `cache` since transformers 5.24, `past_key_values` before."""
    cache = model_kwargs.get("cache")
    return model_kwargs.get("past_key_values") if cache is None else cache


def reaches_its_window(layer) -> bool:
    """Whether a cache layer has dropped keys, so that it cannot be rolled back to its beginning."""
    return getattr(layer, "is_sliding", False) and layer.get_seq_length() >= layer.sliding_window


def execution_device(model: nn.Module) -> torch.device:
    """The device that the model's first layer runs on, also where accelerate keeps the weights elsewhere meanwhile."""
    embedding = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if device is None:
        return embedding.weight.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


__all__ = ["cache_of", "check_call", "execution_device", "reason_not_to_draft"]
