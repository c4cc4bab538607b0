"""What is known of a call's draws when its drafts are ranked: the noise to come, and how the call warps its laws."""

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..model.generation_hook import Call
from .tree_building import Draws


class CallDraws:
    """
    Args:
        call ([`Call`]): A sampling call with foreseen noise.
    """

    def __init__(self, call: Call):
        self._noise, self._stats = call.noise, call.stats
        self._stats.ranked_by = "noise"
        self._settings = {}
        for processor in call.arguments.get("logits_processor") or ():
            if type(processor) is TemperatureLogitsWarper:
                self._settings["temperature"] = processor.temperature
            elif type(processor) is TopKLogitsWarper:
                self._settings["top_k"] = processor.top_k
            elif type(processor) is TopPLogitsWarper:
                self._settings["top_p"] = processor.top_p
            elif type(processor) is MinPLogitsWarper:
                self._settings["min_p"] = processor.min_p

    def next(self, depth: int) -> Draws | None:
        """Of so many levels; `None` where the draws cannot be foreseen."""
        if not self._noise.is_foreseeable:
            self._stats.ranked_by = "law"
            self._stats.ranking_reason = "something else draws from the global generator between the target's draws"
            return None
        return Draws(torch.cat([self._noise.row(level) for level in range(depth)]), **self._settings)


__all__ = ["CallDraws"]
