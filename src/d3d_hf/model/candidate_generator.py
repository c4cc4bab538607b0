"""The second door: a candidate generator inside transformers' own assisted loop, with chain drafts.

For targets that the package's loop does not take, and for code that came with a repository, without the package.
Drafts are the drafter's likeliest tokens, and no law is handed over: the target's own choices decide, which is exact.
transformers calls logits processors on rejected text too and looks at stopping criteria after whole blocks only, so
calls for which that makes a difference run plain.
"""

import contextvars
import logging
import time

import torch
import transformers
import transformers.generation.logits_process as logits_processors
from packaging.version import Version
from transformers import StaticCache, WatermarkLogitsProcessor
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer

from .backbones import cache_of
from .drafting_options import DraftingOptions
from .drafting_session import DraftingSession
from .generation_hook import Call, Door, DraftingError, tell_once, wrap_method
from .generation_stats import GenerationStats


logger = logging.getLogger(__name__)

_DISPATCH = "_get_candidate_generator"
_BLOCK_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
# Later releases verify on static caches too, as long as they can be cropped.
_STATIC_CACHES_ARE_REFUSED = Version(transformers.__version__) < Version("5.24")
_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")
# The call that runs in transformers' loop in this context.
_current = contextvars.ContextVar("d3d_call", default=None)


class D3DCandidateGenerator(CandidateGenerator):
    """
    Drafts for one call of `generate` in transformers' own assisted loop; on the caller's thread.

    Every attribute that the base class of a supported release declares is here too: transformers reads some of them.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The model that drafts.
        options ([`DraftingOptions`]): Of the call.
        stats ([`GenerationStats`]): Kept up to date.
        max_length (`int`): Of prompt and output.
        vocab_size (`int`): The target's.
        attention_mask (`torch.Tensor` of shape `(1, prompt_length)`, *optional*): 0 where the prompt is padding.
    """

    requires_model_outputs = False

    def __init__(
        self,
        drafter,
        options: DraftingOptions,
        stats: GenerationStats,
        max_length: int,
        vocab_size: int,
        attention_mask: torch.Tensor | None = None,
    ):
        self.options, self.stats = options, stats
        self._session = DraftingSession(drafter, vocab_size, options.num_denoising_steps, options.compile_drafter)
        self._max_length, self._attention_mask = max_length, attention_mask
        self._has_failed = False
        self._num_known, self._verify_start = None, None

    @property
    def num_drafting_tokens(self) -> int:
        """The most tokens that one draft may have; transformers keeps so many recurrent states to roll back to."""
        return self.options.num_assistant_tokens

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, None]:
        """
        Drafts the tokens after `input_ids`.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): The whole text so far.

        Returns:
            `input_ids` with the draft appended, and `None`: no law is handed over.
        """
        start = time.perf_counter()
        num_tokens = min(self.options.num_assistant_tokens, self._max_length - input_ids.shape[1] - 1)
        draft = input_ids.new_empty(0)
        if num_tokens > 0 and not self._has_failed:
            try:
                self._session.prepare()
                draft = self._session.draft(attended_tokens(input_ids, self._attention_mask), num_tokens)
            except Exception as error:
                self._has_failed = True
                report_failure(error, self.options, self.stats)
        self._num_known, self._verify_start = input_ids.shape[1], time.perf_counter()
        self.stats.record_draft(draft.shape[0], 1e3 * (self._verify_start - start))
        return torch.cat([input_ids, draft.to(input_ids.device)[None]], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor | None, num_matches: int):
        """Counts the round by its new tokens."""
        num_new_tokens = input_ids.shape[1] - self._num_known
        if num_new_tokens:
            self.stats.record_verdict(num_new_tokens, self._verify_start, time.perf_counter())

    def close(self):
        """Frees the drafter's cache; called however the generation ends. Idempotent."""
        self._session.close()


def report_failure(error: Exception, options: DraftingOptions, stats: GenerationStats):
    """Counts a failure to draft and says so, or raises it where the options ask for that."""
    stats.num_errors += 1
    if options.on_draft_error == "raise":
        raise DraftingError(f"Drafting failed ({type(error).__name__}: {error}).") from error
    logger.warning(
        f"Drafting failed ({type(error).__name__}: {error}): the rest of this generation runs without drafts."
    )


def attended_tokens(input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> torch.LongTensor:
    """Tokens of shape `(length,)` without padding; text beyond the mask's end is never padding."""
    tokens = input_ids[0]
    if attention_mask is None:
        return tokens
    is_token = torch.ones_like(tokens, dtype=torch.bool)
    prompt_length = min(attention_mask.shape[1], tokens.shape[0])
    is_token[:prompt_length] = attention_mask[0, :prompt_length].to(tokens.device).bool()
    return tokens[is_token]


class CandidateGeneratorDoor(Door):
    name = "candidate generator"

    def reason_against(self, call: Call) -> str | None:
        arguments, cache = call.arguments, cache_of(call.arguments)
        if not wrap_method(_DISPATCH, _wrap_dispatch):
            return f"transformers {transformers.__version__} has no GenerationMixin.{_DISPATCH}"
        if not getattr(cache, "is_croppable", True) or (isinstance(cache, StaticCache) and _STATIC_CACHES_ARE_REFUSED):
            return f"the target's cache, a {type(cache).__name__}, cannot be rolled back after a verification"
        if cache.get_seq_length():
            return "past_key_values holds text already, which transformers' assisted loop would feed again"
        config = call.generation_config
        if config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions):
            return "hidden states or attentions were asked for, which transformers' assisted loop cuts in another way"
        for processor in arguments.get("logits_processor") or ():
            if not _is_stateless(processor):
                return f"{type(processor).__name__} must be called once per token, which no assistant can promise here"
        for criterion in arguments.get("stopping_criteria") or ():
            if type(criterion) not in _BLOCK_CRITERIA:
                return f"{type(criterion).__name__} must see every token, which no assistant can promise here"
        return None

    def run(self, call: Call, assisted_decoding):
        if call.options.drafting_mode == "async":
            reason = call.stats.door_reason or "it needs the d3d_hf package: pip install d3d_hf"
            tell_once(call.drafter, f"drafting_mode='async' is drafted synchronously here: {reason}.")
        token = _current.set(call)
        generator = None
        try:
            generator = call.generator = D3DCandidateGenerator(
                call.drafter,
                call.options,
                call.stats,
                call.generation_config.max_length,
                call.target.config.get_text_config().vocab_size,
                call.arguments.get("attention_mask"),
            )
            streamer = call.arguments.get("streamer")
            return assisted_decoding() if streamer is None else assisted_decoding(streamer=_Watched(streamer, call))
        finally:
            _current.reset(token)
            if generator is not None:
                call.has_begun = call.has_begun or call.stats.num_rounds > 0
                generator.close()


class _Watched(BaseStreamer):
    """Hands everything on to a streamer, and notes that it was called: what it has seen cannot be taken back."""

    def __init__(self, streamer, call: Call):
        self._streamer, self._call = streamer, call

    def put(self, value):
        self._call.has_begun = True
        self._streamer.put(value)

    def end(self):
        self._streamer.end()


def _is_stateless(processor) -> bool:
    """Whether a processor is one of transformers' own that goes by its arguments alone."""
    name = type(processor).__name__
    is_own = getattr(logits_processors, name, None) is type(processor)
    return is_own and name not in _STATEFUL and not isinstance(processor, WatermarkLogitsProcessor)


def _wrap_dispatch(original):
    def _get_candidate_generator(self, *args, **kwargs):
        call = _current.get()
        # By whatever name it is given.
        if call is None or not any(value is call.drafter for value in (*args, *kwargs.values())):
            return original(self, *args, **kwargs)
        return call.generator

    return _get_candidate_generator


__all__ = [
    "CandidateGeneratorDoor",
    "D3DCandidateGenerator",
    "attended_tokens",
    "report_failure",
]
