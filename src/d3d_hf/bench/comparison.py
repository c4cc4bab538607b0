"""Two answers to one prompt: where they part, and how close the target's choice was there."""

import math
from dataclasses import dataclass

import torch


@dataclass
class Difference:
    """
    The first difference between two answers of one model.

    Attributes:
        index (`int`): Its token, counted from 0 at the first new token.
        plain_id, drafted_id (`int`, *optional*): The two tokens; `None` where that answer has ended.
        logit_gap (`float`, *optional*):
            The plain token's logit less the drafted one's in one forward over the text before them; `None` where one
            answer has ended.
        rounding (`float`, *optional*): Distance of neighbouring numbers of the model's dtype at the larger of the two.
    """

    index: int
    plain_id: int | None
    drafted_id: int | None
    logit_gap: float | None = None
    rounding: float | None = None


def first_difference(
    model, prompt_ids: torch.LongTensor, plain_ids: torch.LongTensor, drafted_ids: torch.LongTensor
) -> Difference | None:
    """
    Args:
        model (`PreTrainedModel`): The model that gave both answers.
        prompt_ids (`torch.LongTensor` of shape `(1, prompt_length)`): On the model's device.
        plain_ids (`torch.LongTensor` of shape `(length,)`): The answer without a drafter.
        drafted_ids (`torch.LongTensor` of shape `(other_length,)`): The answer with one.

    Returns:
        [`Difference`], or `None` if the answers are equal.
    """
    if torch.equal(plain_ids, drafted_ids):
        return None
    num_common = min(len(plain_ids), len(drafted_ids))
    differs = (plain_ids[:num_common] != drafted_ids[:num_common]).nonzero()
    index = int(differs[0]) if len(differs) else num_common
    plain_id, drafted_id = (int(ids[index]) if index < len(ids) else None for ids in (plain_ids, drafted_ids))
    difference = Difference(index, plain_id, drafted_id)
    if len(differs):
        prefix = torch.cat([prompt_ids, plain_ids[None, :index].to(prompt_ids.device)], dim=1)
        with torch.no_grad():
            logits = model(prefix).logits[0, -1]  # (vocab_size,)
        pair = logits[[plain_id, drafted_id]]
        difference.logit_gap = float(pair[0].float() - pair[1].float())
        _, exponent = math.frexp(float(pair.abs().max()))
        difference.rounding = torch.finfo(logits.dtype).eps * 2.0 ** (exponent - 1)
    return difference


__all__ = ["Difference", "first_difference"]
