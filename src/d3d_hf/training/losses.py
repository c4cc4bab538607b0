"""Losses of drafter training, as pure functions over the supervised rows."""

import torch
import torch.nn.functional as F


def token_loss(
    logits: torch.Tensor,
    labels: torch.LongTensor,
    teacher_logits: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """
    Loss of each row: cross-entropy on the token, mixed with the divergence from a teacher's law (arXiv 1503.02531).

    Args:
        logits (`torch.Tensor` of shape `(rows, vocab)`): The drafter's.
        labels (`torch.LongTensor` of shape `(rows,)`): Tokens.
        teacher_logits (`torch.Tensor` of shape `(rows, vocab)`, *optional*): The target's, at the same places.
        distillation_weight (`float`): Share of the divergence.
        temperature (`float`): Softens both laws; the divergence is scaled by its square, as usual.

    Returns:
        `torch.FloatTensor` of shape `(rows,)`.
    """
    loss = F.cross_entropy(logits.float(), labels, reduction="none")
    if teacher_logits is None or distillation_weight == 0:
        return loss
    log_probs = F.log_softmax(logits.float() / temperature, dim=-1)
    teacher_log_probs = F.log_softmax(teacher_logits.float() / temperature, dim=-1)
    divergence = F.kl_div(log_probs, teacher_log_probs, log_target=True, reduction="none").sum(-1)
    return (1 - distillation_weight) * loss + distillation_weight * temperature**2 * divergence


def weighted_mean(losses: torch.Tensor, weights: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """`sum(losses * weights) / denominator`, finite (zero) where nothing is supervised."""
    return (losses * weights).sum() / denominator.clamp(min=torch.finfo(torch.float32).tiny)


__all__ = ["token_loss", "weighted_mean"]
