"""The decoding loop: draft, target pass, walk, commit.

One round is a draft that hangs on the text, one pass of the target over it, a walk along the target's own choices, and
a commit of what they accepted. The modes differ in where the next draft comes from, not in the loop. `input_ids` come
from `generate` through model/generation_hook.py; what goes back to it is plain decoding's, field by field.
"""

import contextlib
import dataclasses
import time

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..model.backbones import cache_argument, rope_switch
from ..model.generation_hook import Call, Door, logger
from .async_drafts import AsyncDrafts
from .auto_drafts import AutoDrafts
from .drafts import Drafts
from .target_pass import TargetPasses, growing_cache, reason_not_to_pass, takes_trees
from .walk import Walk


_DRAFTS = {"sync": Drafts, "async": AsyncDrafts, "auto": AutoDrafts}


class LoopDoor(Door):
    """The package's own loop."""

    name = "loop"

    def reason_against(self, call: Call) -> str | None:
        return reason_not_to_pass(call)

    def run(self, call: Call, assisted_decoding):
        return decode(call)


@torch.no_grad()
def decode(call: Call):
    """
    Runs one call of `generate` with drafts.

    Returns:
        What plain `generate` returns: ids of shape `(1, length)`, or a `GenerateDecoderOnlyOutput`.
    """
    target, synced_gpus = call.target, bool(call.arguments.get("synced_gpus"))
    stats, walk, reach = call.stats, Walk(call), RopeReach(target.config.get_text_config())
    with growing_cache(call) as cache, contextlib.closing(make_drafts(call)) as drafts:
        passes = TargetPasses(call, cache)
        while True:
            # Under ZeRO-3 and FSDP every process makes as many passes as the one that makes most.
            others = synced_gpus and target._has_unfinished_sequences(walk.is_finished, True, target.device)
            if walk.is_finished and not others:
                break
            room = call.generation_config.max_length - walk.input_ids.shape[1] - 1
            tree = drafts.next(walk.text, 0 if walk.is_finished else min(room, reach.room_after(len(walk.text))))

            start = time.perf_counter()
            output = passes.run(passes.unread(walk.input_ids), tree)
            if walk.is_finished:
                cache.keep(output.num_cached, [])
                continue

            try:
                path = walk(tree, output)
            finally:  # also where the caller's own code raised: a cache of the caller's holds text, never drafts
                passes.commit(output, walk.path)
            end = time.perf_counter()
            stats.record_verdict(len(path) + 1, start, end)
            drafts.observe(tree, path, output.num_context + len(tree), end - start)
    streamer = call.arguments.get("streamer")
    if streamer is not None:
        streamer.end()
    return _result(call, walk)


def make_drafts(call: Call) -> Drafts:
    """Where a call's drafts come from, by its drafting mode, or a drafter's own `make_drafts(call)`, if it has one."""
    own = getattr(call.drafter, "make_drafts", None)
    if own is not None:
        return own(call)
    return _DRAFTS[call.options.drafting_mode](call, takes_trees(call))


def _result(call: Call, walk: Walk):
    if not call.generation_config.return_dict_in_generate:
        return walk.input_ids
    name = cache_argument(call.target)
    fields = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}

    def given(values: list | None) -> tuple | None:
        return None if values is None else tuple(values)

    return GenerateDecoderOnlyOutput(
        sequences=walk.input_ids,
        scores=given(walk.scores),
        logits=given(walk.logits),
        attentions=given(walk.attentions),
        hidden_states=given(walk.hidden_states),
        **{"cache" if "cache" in fields else "past_key_values": call.model_kwargs[name]},
    )


class RopeReach:
    """
    How far a draft may reach so that the target's RoPE is what it is in plain decoding. Where it goes by the length of
    the pass, drafted tokens would change the encoding of those before them, and so what the target itself chooses.

    Args:
        config (`PreTrainedConfig`): The target's.
    """

    def __init__(self, config):
        self._limit, self._is_steady_beyond = rope_switch(config)
        self._has_told = False

    def room_after(self, num_tokens: int) -> float:
        """Draft tokens that may follow a text of so many."""
        if self._limit is None:
            return float("inf")
        if num_tokens <= self._limit:
            return self._limit - num_tokens
        if self._is_steady_beyond:
            return float("inf")
        if not self._has_told:
            self._has_told = True
            logger.warning(
                f"The text outgrows {self._limit} tokens, from where on the target's dynamic RoPE changes with every "
                f"token: the rest of this generation runs without drafts."
            )
        return 0


__all__ = ["LoopDoor", "RopeReach", "decode", "make_drafts"]
