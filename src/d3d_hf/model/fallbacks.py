"""When a generation runs without drafts, and when it is refused.

What `generate` can do without a drafter it can do with one: where drafting is impossible the generation runs plain and
one warning says why. Errors are for calls that can never be right, and come before any work is done.
"""

from .backbones import cache_of, execution_device


def check_call(drafter, target, arguments: dict):
    """
    Refuses what a drafter can never do.

    Raises:
        ValueError:
            The target is an encoder-decoder model, the text is given as `inputs_embeds`, or the drafter has another
            tokenizer than the target.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model, and a D3D drafter drafts for decoder-only targets: "
            f"call generate without assistant_model."
        )
    if arguments.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds was given, but a D3D drafter reads token ids: pass input_ids, or call generate without "
            "assistant_model."
        )
    if arguments.get("assistant_tokenizer") is not None:
        raise ValueError(
            f"The drafter's vocabulary has {drafter.config.vocab_size} tokens and `assistant_tokenizer` was given, "
            f"but a D3D drafter drafts in its target's own tokens: use a drafter trained for this target."
        )


def reason_not_to_draft(drafter, input_ids, generation_config, arguments: dict) -> str | None:
    """
    Why this generation should run without drafts whatever the door, or `None` if it need not.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The model that would draft.
        input_ids (`torch.LongTensor` of shape `(batch, length)`): The prompt.
        generation_config (`GenerationConfig`): The call's, as prepared by transformers.
        arguments (`dict`): The call's other arguments, KV cache included.
    """
    if drafter.training:
        return "the drafter is in train mode (call drafter.eval())"
    if execution_device(drafter).type == "meta":
        return "the drafter is on the meta device (load its weights)"
    if input_ids.shape[0] > 1:
        return f"the batch size is {input_ids.shape[0]}, and one sequence at a time is drafted for"
    if not arguments.get("use_cache", True) or generation_config.use_cache is False:
        return "use_cache is False, and a verification needs the target's cache"
    cache = cache_of(arguments)
    if cache is None:
        return "the target keeps no cache that could be rolled back"
    if cache.get_seq_length() > 0:
        mask = arguments.get("attention_mask")
        text_length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
        if text_length != input_ids.shape[1]:
            return "past_key_values holds text that input_ids lacks (pass the whole text to have it drafted for)"
        if cache.get_seq_length() >= text_length:
            return "past_key_values holds all the text, and nothing is left for the target to read"
    return None


__all__ = ["check_call", "reason_not_to_draft"]
