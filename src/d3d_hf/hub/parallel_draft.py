"""The parallel-draft layout: what serving engines run, and what other projects publish.

It is a plain checkpoint of its architecture whose config.json names the token that stands in mask slots. An engine
feeds it `[..., anchor, mask, mask, ...]` in one causal pass and reads a draft token off the anchor and off each mask:
a D3D drafter with causal block attention, drafting synchronously.
"""

import copy
import json
import os
from collections.abc import Set
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from ..model.checkpoints import hub_arguments, load_checked
from ..model.modeling_d3d import D3DDrafterForCausalLM


# Architectures that both engines run as draft models.
EXPORTABLE = ("llama", "qwen2", "qwen3")
_MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")
_SHOWN_TOKENS = 3


@torch.no_grad()
def export_parallel_draft(
    drafter: D3DDrafterForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    mask_token_id: int | None = None,
) -> int:
    r"""
    Writes a drafter as a plain checkpoint of its backbone's architecture, with `pard_token` and `block_size` in
    config.json, and the tokenizer's files.

    Engines want the draft model's vocabulary to be as large as the target's, so the mask embedding takes the place of
    a row that no text uses, and rows beyond the vocabulary are cut. The head gets a matrix of its own, whose row of
    the mask is the mean of all the others: its logit is the mean of theirs, so that the mask is never the likeliest
    token. A chained head is left out: engines have no place for it.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): With causal block attention, or with one mask slot only. Not changed.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        folder (`str` or `os.PathLike`): Where to write.
        mask_token_id (`int`, *optional*):
            The token that stands in mask slots, which must never occur in texts. Default: the drafter's own, or the
            last id that the tokenizer does not use.

    Returns:
        `int`: The token that stands in mask slots.

    Raises:
        ValueError: Engines cannot run the drafter, or there is no row for the mask.
    """
    refuse_unexportable(drafter.config)
    mask_token_id = _row_for_mask(drafter.config, tokenizer, mask_token_id)
    config = copy.deepcopy(drafter.config.backbone_config)
    config.vocab_size, config.tie_word_embeddings = drafter.config.vocab_size, False
    config.pard_token, config.block_size = mask_token_id, drafter.config.block_size
    config.target_name_or_path = drafter.config.target_name_or_path
    special_ids = {name: getattr(drafter.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config.update(special_ids)

    embeddings, head = drafter.get_input_embeddings().weight, drafter.get_output_embeddings().weight
    own = drafter.mask_embedding
    mask_vector = embeddings[drafter.config.mask_token_id] if own is None else own.weight[0]
    is_drafted = torch.arange(config.vocab_size, device=head.device) < head.shape[0]
    is_drafted[mask_token_id] = False
    embeddings, head = _with_rows(embeddings, config.vocab_size), _with_rows(head, config.vocab_size)
    embeddings[mask_token_id] = mask_vector.to(embeddings.dtype)
    head[~is_drafted] = head[is_drafted].float().mean(dim=0).to(head.dtype)

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=drafter.dtype)
    names = model.state_dict().keys()
    state = {name: tensor for name, tensor in drafter.state_dict().items() if name in names}
    model.load_state_dict(
        {**state, "model.embed_tokens.weight": embeddings, "lm_head.weight": head}, strict=True, assign=True
    )
    model.generation_config = GenerationConfig(**special_ids)
    model.save_pretrained(folder)
    path = Path(folder) / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8")) | _older_rope_fields(config)
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return mask_token_id


def refuse_unexportable(config: PreTrainedConfig):
    """
    Raises:
        ValueError: Engines cannot run a drafter of this config, with the reason.
    """
    reason = None
    if config.block_attention != "causal" and config.block_size > 2:
        reason = (
            f"its block attention is {config.block_attention!r}, and engines draft in a plain causal pass: train one "
            f"with block_attention='causal'"
        )
    elif config.backbone_config.model_type not in EXPORTABLE:
        reason = f"its architecture is {config.backbone_config.model_type!r}, and only {EXPORTABLE} are exported"
    if reason is not None:
        raise ValueError(f"The drafter cannot be exported: {reason}.")


def _row_for_mask(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, wanted: int | None) -> int:
    size, used = config.vocab_size, set(tokenizer.get_vocab().values())
    if wanted is not None:
        if not 0 <= wanted < size:
            raise ValueError(f"The mask token is {wanted}: give an id from 0 to {size - 1}, the target's vocabulary.")
        return wanted
    if config.mask_token_id is not None and config.mask_token_id < size:
        return config.mask_token_id
    unused = next((token for token in range(size - 1, -1, -1) if token not in used), None)
    if unused is None:
        raise ValueError(
            f"The tokenizer uses all {size} rows of the target's vocabulary, which a draft model must not exceed, so "
            f"that there is no row for the mask: name a token that never occurs in texts, e.g. a reserved one."
        )
    return unused


def _with_rows(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A copy with so many rows: cut, or the last one repeated, which is what the drafter reads for unknown tokens."""
    rows = torch.arange(num_rows, device=weight.device).clamp(max=weight.shape[0] - 1)
    return weight.detach()[rows].clone()


def _older_rope_fields(config: PreTrainedConfig) -> dict:
    """RoPE settings by the names that engines on transformers 4 read; they would take the architecture's defaults."""
    rope = dict(config.rope_parameters)
    fields = {"rope_theta": rope.pop("rope_theta")}
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    return fields


def import_parallel_draft(
    source: str | os.PathLike,
    block_size: int | None = None,
    mask_token_id: int | None = None,
    target: str | None = None,
    vocab_size: int | None = None,
    **kwargs,
) -> D3DDrafterForCausalLM:
    r"""
    Makes a D3D drafter of a plain checkpoint that was trained as a parallel drafter.

    Args:
        source (`str` or `os.PathLike`): Folder or Hub name of the checkpoint.
        block_size (`int`, *optional*): Draft tokens of one pass, the anchor's own among them. Default: its config's.
        mask_token_id (`int`, *optional*): The token that stands in mask slots. Default: its config's.
        target (`str`, *optional*): Name of the target. Default: what its config says, if it was exported from here.
        vocab_size (`int`, *optional*): The target's vocabulary size. Default: the checkpoint's.
        kwargs: Passed to `AutoModelForCausalLM.from_pretrained`. `dtype` defaults to "auto".

    Returns:
        [`D3DDrafterForCausalLM`] in eval mode, with causal block attention.

    Raises:
        ValueError: The block size or the mask is known neither to the config nor to the caller, or the two differ.
    """
    config = AutoConfig.from_pretrained(source, **hub_arguments(kwargs))
    block_size, mask_token_id = draft_settings(config, block_size, mask_token_id)
    kwargs = {"dtype": "auto", **kwargs}
    model = load_checked(AutoModelForCausalLM.from_pretrained, source, stored_config=config, **kwargs)
    drafter = D3DDrafterForCausalLM.from_backbone(
        model,
        block_size=block_size,
        mask_token_id=mask_token_id,
        block_attention="causal",
        vocab_size=vocab_size,
    )
    drafter.config.target_name_or_path = target or getattr(config, "target_name_or_path", None)
    if os.path.isdir(source):
        drafter.config.backbone_config._name_or_path = ""  # a path of this machine
    for name in (*_MASK_KEYS, "block_size", "target_name_or_path"):
        drafter.config.backbone_config.__dict__.pop(name, None)
    return drafter


def draft_settings(
    config: PreTrainedConfig, block_size: int | None = None, mask_token_id: int | None = None
) -> tuple[int, int]:
    """
    Block size and mask token of a parallel drafter: the caller's, or what its config says.

    Raises:
        ValueError: One of them is unknown, impossible, or the config names another mask.
    """
    known = {getattr(config, name) for name in _MASK_KEYS if getattr(config, name, None) is not None}
    if mask_token_id is not None and known - {mask_token_id}:
        raise ValueError(
            f"The mask token is given as {mask_token_id}, but the config says {sorted(known)}: leave it out."
        )
    if mask_token_id is None and len(known) != 1:
        raise ValueError(
            f"The config names {len(known)} mask tokens ({', '.join(_MASK_KEYS)}): give the id of the token that "
            f"stands in mask slots (--mask-token-id)."
        )
    block_size = getattr(config, "block_size", None) if block_size is None else block_size
    if block_size is None:
        raise ValueError("The config names no block_size: give the number of draft tokens of one pass (--block-size).")
    return block_size, mask_token_id if mask_token_id is not None else known.pop()


def check_same_tokens(own: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, unused: Set[int] = frozenset()):
    """
    A drafter drafts in its target's own tokens, so every token of the target must have the same id in its tokenizer.
    It may know more: published parallel drafters have a mask token.

    Args:
        own, target (`PreTrainedTokenizerBase`): The drafter's and the target's.
        unused (set of `int`, *optional*): Ids that are not compared.

    Raises:
        ValueError: They differ.
    """
    known = own.get_vocab()
    differing = [
        token for token, index in target.get_vocab().items() if index not in unused and known.get(token) != index
    ]
    if differing:
        shown = ", ".join(repr(token) for token in sorted(differing)[:_SHOWN_TOKENS])
        raise ValueError(
            f"{len(differing)} tokens of the target have another id in the drafter's tokenizer or none, {shown} among "
            f"them: take a drafter that was trained for this target."
        )


__all__ = [
    "EXPORTABLE",
    "check_same_tokens",
    "draft_settings",
    "export_parallel_draft",
    "import_parallel_draft",
    "refuse_unexportable",
]
