"""
A DFlash drafter for any Llama-like target, in the one form that transformers generates with natively.

A DFlash block is the anchor and mask slots after it. Its slots attend to each other and to keys and values made from
the target's hidden states of the text before the anchor; a slot's output is the token at its own place. It has neither
an embedding nor a head: both are the target's.

transformers' `speculation_type="dflash"` runs any target whose forward returns the hidden states of chosen layers, and
one drafter class, `MuseGlimmerAssistantModel`: pre-norm layers as Llama's, with QK-norm and no biases. Nothing else in
that class belongs to its family, so a drafter for another target is a config of it with the target's sizes.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from d3d_hf.model.backbones import resolve_kept_layers


try:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
except ImportError as error:
    raise ImportError(
        "This release of transformers has no native DFlash drafter: pip install -U 'transformers>=5.24'."
    ) from error


def conditioning_layers(num_layers: int, count: int) -> list[int]:
    """Layers of the target whose outputs a drafter reads: from the second to the third last, evenly spread."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, 0)
    return torch.linspace(min(first, last), last, count).round().int().unique().tolist()


def make_dflash_drafter(
    target: PreTrainedModel,
    num_layers: int,
    num_draft_tokens: int,
    mask_token_id: int,
    calibration_ids: torch.LongTensor | None = None,
) -> MuseGlimmerAssistantModel:
    r"""
    An untrained drafter of the target's sizes.

    Args:
        target (`PreTrainedModel`): A causal language model with Llama's layers, QK-norm or not.
        num_layers (`int`): Layers of the drafter.
        num_draft_tokens (`int`): Draft tokens per block; transformers' `block_size` is one more, the anchor.
        mask_token_id (`int`): A token of the target's vocabulary that no text holds; its embedding stands in slots.
        calibration_ids (`torch.LongTensor` of shape `(1, length)`, *optional*):
            A text to set the scales by. With it the layers start as the target's evenly kept ones and the conditioning
            as the mean of the hidden states; without it all weights are random.

    Returns:
        `MuseGlimmerAssistantModel` in float32, eval mode, on the target's device.

    Raises:
        ValueError: A number out of range, or layers that the drafter's class has no place for.
    """
    config = target.config.get_text_config()
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}: give at least 1.")
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise ValueError(f"num_layers is {num_layers}: give 1 to {config.num_hidden_layers}, the target's own number.")
    if not 0 <= mask_token_id < config.vocab_size:
        raise ValueError(f"mask_token_id is {mask_token_id}: give a token id from 0 to {config.vocab_size - 1}.")
    drafter_config = MuseGlimmerAssistantConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_position_embeddings=config.max_position_embeddings,
        layer_types=["full_attention"] * num_layers,
        hidden_act=getattr(config, "hidden_act", None) or config.hidden_activation,
        bos_token_id=config.bos_token_id,
        eos_token_id=None,
        pad_token_id=config.pad_token_id,
        block_size=num_draft_tokens + 1,
        mask_token_id=mask_token_id,
        target_layer_ids=conditioning_layers(config.num_hidden_layers, num_layers),
    )
    # Packed masks are boolean, which the eager attention would add up instead of applying.
    drafter = MuseGlimmerAssistantModel._from_config(
        drafter_config, dtype=torch.float32, attn_implementation="sdpa"
    ).to(target.device)
    if calibration_ids is not None:
        _start_from_target(drafter, target, calibration_ids)
    return drafter.eval()


@torch.no_grad()
def _start_from_target(drafter: MuseGlimmerAssistantModel, target: PreTrainedModel, ids: torch.LongTensor):
    layers = target.base_model.layers
    sources = [layers[i] for i in resolve_kept_layers(drafter.config.num_hidden_layers, len(layers))]
    scales = _qk_scales(target, [source.self_attn for source in sources], ids)
    for layer, source in zip(drafter.layers, sources, strict=True):
        missing, unexpected = layer.load_state_dict(source.state_dict(), strict=False)
        if unexpected or not set(missing) <= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}:
            raise ValueError(
                f"The layers of {type(target).__name__} hold {unexpected} and lack {missing}, which the native DFlash "
                "drafter computes in another way: give no calibration_ids, to start from random weights."
            )
        if missing:  # a norm that keeps the mean size of what it divides by
            for name, norm in (("q_proj", layer.self_attn.q_norm), ("k_proj", layer.self_attn.k_norm)):
                norm.weight.fill_(scales[source.self_attn, name])
    drafter.norm.weight.copy_(target.base_model.norm.weight)

    states = read_hidden_states(target, ids, torch.ones_like(ids), drafter.config.target_layer_ids)
    parts = states.float().unflatten(-1, (-1, drafter.config.hidden_size))  # (1, length, layers, hidden)
    # The median, since the first token's state may be a hundred times as large as the others.
    sizes = parts.pow(2).mean(-1).sqrt().median(dim=1).values[0]  # (layers,)
    identity = torch.eye(drafter.config.hidden_size, device=ids.device)
    drafter.encoder.fc.weight.copy_(torch.cat([identity / (len(sizes) * size) for size in sizes], dim=1))


def _qk_scales(target: PreTrainedModel, attentions: list[nn.Module], ids: torch.LongTensor) -> dict:
    """Mean size (root mean square over a head's channels) of queries and keys of the given attentions."""
    scales, handles = {}, []

    def note(key, head_dim):
        def hook(module, inputs, output):
            scales[key] = output.float().unflatten(-1, (-1, head_dim)).pow(2).mean(-1).sqrt().mean()

        return hook

    for attention in attentions:
        for name in ("q_proj", "k_proj"):
            handles.append(getattr(attention, name).register_forward_hook(note((attention, name), attention.head_dim)))
    try:
        target(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return scales


@torch.no_grad()
def read_hidden_states(
    target: PreTrainedModel, ids: torch.LongTensor, attention_mask: torch.Tensor, layers: list[int]
) -> torch.Tensor:
    """The outputs of the target's given layers side by side, shape `(batch, length, layers * hidden)`."""
    outputs = target.base_model(
        ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=[i + 1 for i in layers]
    )
    return torch.cat([outputs.hidden_states[i + 1] for i in layers], dim=-1)


def unused_token(tokenizer, rows) -> int:
    """
    An added token of the tokenizer that no text holds, to mask with.

    Raises:
        ValueError: There is none.
    """
    used = {token for ids, _ in rows for token in ids} | set(tokenizer.all_special_ids)
    free = sorted(set(tokenizer.get_added_vocab().values()) - used)
    if not free:
        raise ValueError("Every added token of the tokenizer stands in some text: name one with --mask-token-id.")
    return free[-1]
