"""The target's passes over one text: each is one call of the target, over what it lacks of the text and a draft.

The target's keys and values are kept in storage that grows by doubling, whatever cache `generate` was given or made:
what it held is copied in once, and at the end it holds what plain decoding would have left in it.
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..model.backbones import cache_argument, refuse_unpackable, rope_switch
from ..model.generation_hook import Call
from ..model.packing import attention_masks, lay_out_tree
from ..model.storage import GrowingCache
from .draft_tree import DraftTree


# Arguments of a forward that go with the text, and how they go on; all other tensors are refused.
_KNOWN_TENSORS = ("attention_mask", "position_ids", "cache", "past_key_values")
_TREE_ATTENTION = ("sdpa", "eager", "flex_attention", "d3d_packed")
# Context tokens of a pass with a tree at most: its mask is written out.
_MOST_CONTEXT_WITH_TREE = 512


def reason_not_to_pass(call: Call) -> str | None:
    """Why these passes cannot serve a call; `None` if they can."""
    cache = call.model_kwargs.get(cache_argument(call.target))
    if type(cache) not in (DynamicCache, GrowingCache) and not isinstance(cache, GrowingCache):
        return f"the target's cache, a {type(cache).__name__}, is not a plain dynamic one"
    if getattr(cache, "offloading", False):
        return "the target's cache is offloaded"
    for layer in cache.layers:
        if not isinstance(cache, GrowingCache) and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"the target's cache has layers of another kind than attention, {type(layer).__name__}"
    for name, value in call.model_kwargs.items():
        if name not in _KNOWN_TENSORS and isinstance(value, torch.Tensor) and value.dim() > 0:
            return f"the target's forward is given {name}"
    positions = call.model_kwargs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return "the target's positions are not one number a token"
    has_windows = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
    if has_windows and call.generation_config.output_attentions:
        return "attentions were asked for, whose rows in sliding layers one pass over several tokens cannot give"
    return None


def takes_trees(call: Call) -> bool:
    """Whether the target's attention goes by masks and positions alone, so that a pass may be more than a chain."""
    config = call.target.config.get_text_config()
    is_asked_for_layers = call.generation_config.output_attentions or call.generation_config.output_hidden_states
    if call.model_kwargs.get("attention_mask") is not None or call.model_kwargs.get("position_ids") is None:
        return False
    try:
        refuse_unpackable(config)
    except ValueError:
        return False
    return config._attn_implementation in _TREE_ATTENTION and not is_asked_for_layers


@contextlib.contextmanager
def growing_cache(call: Call):
    """Storage for a call's keys and values; the cache that it came with follows at the end, however it comes."""
    given = call.model_kwargs[cache_argument(call.target)]
    if isinstance(given, GrowingCache):
        yield given
        return
    config = call.target.config.get_text_config()
    num_layers = len(given.layers) or config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    cache = GrowingCache(num_layers, call.generation_config.max_length)
    _fill(cache, given)
    start = cache.get_seq_length()
    try:
        yield cache
    finally:
        _hand_back(cache, given, start, is_seen=_is_seen(call, given))


def _fill(cache: GrowingCache, given: DynamicCache):
    for layer, old in zip(cache.layers, given.layers):
        length = old.get_seq_length()
        if length:
            keys, values = old.keys, old.values
            num_dropped = length - keys.shape[2]  # keys that no window reaches any more
            if num_dropped:
                keys, values = (F.pad(states, (0, 0, num_dropped, 0)) for states in (keys, values))
            layer.update(keys, values)


def _is_seen(call: Call, given: DynamicCache) -> bool:
    """Whether anybody looks at the cache after the call."""
    return bool(call.generation_config.return_dict_in_generate) or getattr(given, "_is_user_defined", True)


def _hand_back(cache: GrowingCache, given: DynamicCache, start: int, is_seen: bool):
    """Puts what the storage holds into the cache that the call came with, which held `start` tokens."""
    length = cache.get_seq_length()
    if not is_seen or length == start:
        return
    while len(given.layers) < len(cache.layers):
        given.layers.append(given.layer_class_to_replicate())
    for layer, new in zip(given.layers, cache.layers):
        if not new.is_initialized:
            continue
        first = 0
        if layer.is_sliding:
            first = max(0, length - layer.sliding_window + 1)
        keys, values = (x[:, :, first:length].clone() for x in (new.keys, new.values))
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if layer.is_sliding:
            layer.cumulative_length = length


@dataclass
class PassOutput:
    """
    Attributes:
        logits (`torch.Tensor` of shape `(1 + nodes, vocab)`): Of the root and of each node of the draft.
        outputs (`ModelOutput`): The target's.
        num_context (`int`): Tokens of the text in the pass, the root being the last.
        num_cached (`int`): Tokens of the text before them.
    """

    logits: torch.Tensor
    outputs: object
    num_context: int
    num_cached: int


class TargetPasses:
    """
    Args:
        call ([`Call`]): The call.
        cache ([`GrowingCache`]): The target's storage.
    """

    def __init__(self, call: Call, cache: GrowingCache):
        self._target, self._cache = call.target, cache
        self._kwargs = {name: value for name, value in call.model_kwargs.items() if name not in _KNOWN_TENSORS}
        self._kwargs[cache_argument(call.target)] = cache
        self._mask = call.model_kwargs.get("attention_mask")  # (1, prompt): None without padding
        self._positions = call.model_kwargs.get("position_ids")  # (1, prompt): None where the target takes none
        self._prompt_length = call.input_ids.shape[1]
        self._keeps_logits = "logits_to_keep" in self._kwargs
        self._chunk = call.generation_config.prefill_chunk_size
        self._is_first = True
        self._rope_limit = rope_switch(call.target.config.get_text_config())[0]

    @property
    def num_cached(self) -> int:
        """Tokens of the text that the target has read."""
        return self._cache.get_seq_length()

    def unread(self, input_ids: torch.LongTensor) -> torch.LongTensor:
        """
        What the target has not read of a text: all of it where the target reads it anew, as Phi-3 does when the text
        outgrows the length from where on its RoPE is another one.
        """
        limit = self._rope_limit
        if limit is not None and 0 < self.num_cached <= limit < input_ids.shape[1]:
            inputs = self._target.prepare_inputs_for_generation(input_ids, **self._kwargs)
            if inputs.get(cache_argument(self._target)) is None:
                self._cache.keep(0, [])
        return input_ids[:, self.num_cached :]

    def run(self, new_ids: torch.LongTensor, tree: DraftTree) -> PassOutput:
        """
        One pass.

        Args:
            new_ids (`torch.LongTensor` of shape `(1, length)`): What the target has not read of the text.
            tree ([`DraftTree`]): The draft, a chain unless the call [`takes_trees`].
        """
        most = self._chunk or (None if tree.is_chain else _MOST_CONTEXT_WITH_TREE)
        while most is not None and new_ids.shape[1] > most:
            self._forward(new_ids[:, :most], DraftTree.empty())
            new_ids = new_ids[:, most:]
        num_cached = self.num_cached
        outputs = self._forward(new_ids, tree)
        logits = outputs.logits[0, -len(tree) - 1 :]
        return PassOutput(logits, outputs, new_ids.shape[1], num_cached)

    def _forward(self, new_ids: torch.LongTensor, tree: DraftTree):
        kwargs, num_cached = dict(self._kwargs), self.num_cached
        ids = new_ids
        if len(tree):
            ids = torch.cat([new_ids, tree.tokens.to(new_ids.device, non_blocking=True)[None]], dim=1)
        num_tokens = ids.shape[1]
        if self._keeps_logits:
            kwargs["logits_to_keep"] = len(tree) + 1
        layout = None
        if not tree.is_chain:
            layout = lay_out_tree(new_ids.shape[1], tree.parents, num_cached, device=self._target.device)
        if self._positions is not None:
            positions = self._positions_of(num_cached, num_tokens if tree.is_chain else new_ids.shape[1])
            if layout is not None:
                depths = layout.position_ids[:, new_ids.shape[1] :] - (num_cached + new_ids.shape[1] - 1)
                positions = torch.cat([positions, positions[:, -1:] + depths], dim=1)
            kwargs["position_ids"] = positions
        kwargs["attention_mask"] = None
        if self._mask is not None:
            missing = num_cached + num_tokens - self._mask.shape[1]
            kwargs["attention_mask"] = self._mask[:, : num_cached + num_tokens]
            if missing > 0:
                kwargs["attention_mask"] = torch.cat([self._mask, self._mask.new_ones(1, missing)], dim=1)
        inputs = self._target.prepare_inputs_for_generation(ids, is_first_iteration=self._is_first, **kwargs)
        self._is_first = False
        if layout is not None:
            config = self._target.config.get_text_config()
            inputs["attention_mask"] = attention_masks(layout, config, self._target.dtype)
        self._cache.layout = layout
        try:
            return self._target(**inputs, return_dict=True)
        except BaseException:
            self._cache.keep(num_cached, [])  # some layers have read the tokens, others have not
            raise
        finally:
            self._cache.layout = None

    def _positions_of(self, num_cached: int, num_tokens: int) -> torch.LongTensor:
        """Positions of text from `num_cached` on, which go on from the caller's: shape `(1, num_tokens)`."""
        given = self._positions
        start = num_cached - self._prompt_length  # of this pass, counted from the prompt's end
        first = given.shape[1] + start
        positions = given[:, max(first, 0) : max(first + num_tokens, 0)] if start < 0 else given[:, :0]
        missing = num_tokens - positions.shape[1]
        if missing:
            steps = torch.arange(max(start, 0) + 1, max(start, 0) + 1 + missing, device=given.device)
            positions = torch.cat([positions, given[:, -1:] + steps], dim=1)
        return positions

    def commit(self, output: PassOutput, path: list[int]):
        """
        Keeps the accepted tokens' keys and values, and drops the others.

        Args:
            output ([`PassOutput`]): Of the pass.
            path (`list[int]`): The accepted nodes, from the root's child on.
        """
        start = output.num_cached + output.num_context
        self._cache.keep(start, [start - 1 + node for node in path])


__all__ = ["PassOutput", "TargetPasses", "growing_cache", "reason_not_to_pass", "takes_trees"]
