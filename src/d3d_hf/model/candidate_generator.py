"""The bridge to transformers: a `CandidateGenerator` over a drafting session, and the stock assistant protocol."""

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig, StopStringCriteria
from transformers.generation.candidate_generator import CandidateGenerator

from .backbones import rope_switch
from .drafting_options import DraftingOptions
from .drafting_session import Draft, DraftingSession
from .generation_stats import GenerationStats
from .token_chooser import TokenChooser, warpers_of
from .verification import length_before_stop, length_through_eos, one_hot_law


logger = logging.getLogger(__name__)

# Older releases ask the stopping criteria about the candidate before verifying it: if the prompt itself meets one (it
# ends in EOS) and the draft is empty, they emit nothing at all, where plain generation emits at least one token.
_CRITERIA_SEE_CANDIDATES = Version(transformers.__version__) < Version("5.19")


class D3DCandidateGenerator(CandidateGenerator):
    """
    Drafts for one call of `generate`, synchronously: each draft is made after the verdict on the one before.

    Runs on the caller's thread. Nothing is computed before the first `get_candidates`.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The model that drafts.
        generation_config (`GenerationConfig`): The call's, as prepared by transformers; not modified.
        attention_mask (`torch.Tensor` of shape `(1, prompt_length)`, *optional*): 0 where the prompt is padding.
        stop_criteria (`StopStringCriteria`, *optional*): Of the call's stop strings.
        vocab_size (`int`): The target's vocabulary size.
        target_config (`PreTrainedConfig`, *optional*): The target's, for RoPE that changes with the text's length.

    Raises:
        ValueError: A drafting option has an unusable value.
    """

    requires_model_outputs = False

    def __init__(
        self,
        drafter,
        generation_config: GenerationConfig,
        attention_mask: torch.Tensor | None,
        stop_criteria: Callable | None,
        vocab_size: int,
        target_config=None,
    ):
        config = drafter.config
        self.options = DraftingOptions.resolve(generation_config, drafter.generation_config, config.block_size)
        # Stop strings cut a draft by its content, which is exact only if no law is handed over: see verification.py.
        draws = bool(generation_config.do_sample) and stop_criteria is None
        self._chooser = TokenChooser(
            vocab_size,
            never_drafted=() if config.mask_token_id is None else (config.mask_token_id,),
            warpers=warpers_of(generation_config) if draws else None,
        )
        self._session = self._make_session(drafter)
        self._stop_criteria = stop_criteria
        self._eos_token_ids = _eos_token_ids(generation_config)
        self._max_length = generation_config.max_length
        self._attention_mask = attention_mask
        self._rope_limit, self._is_steady_beyond = (
            (None, True) if target_config is None else rope_switch(target_config)
        )
        self._is_past_rope_limit = False
        self.stats = GenerationStats()
        self._has_failed = False
        self._verify_start = None
        self._num_known = None

    @property
    def num_drafting_tokens(self) -> int:
        """The most tokens that one draft may have; transformers keeps so many recurrent states to roll back to."""
        return self.options.num_assistant_tokens

    def _make_session(self, drafter) -> DraftingSession:
        options = self.options
        return DraftingSession(drafter, self._chooser, options.num_denoising_steps, options.compile_drafter)

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        Drafts the tokens after `input_ids`.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): The whole text so far.

        Returns:
            `input_ids` with the draft appended, and the float32 logits of shape `(1, draft_length, vocab_size)` that
            the draft was drawn from, or `None` if the draft is empty or was not drawn.
        """
        start = time.perf_counter()
        is_first = self._num_known is None
        budget = min(self._max_length - input_ids.shape[1] - 1, self._rope_budget(input_ids))
        draft = self._draft(input_ids, budget)
        if len(draft) == 0 and is_first and _CRITERIA_SEE_CANDIDATES:
            draft = self._placeholder()
        law = draft.law if len(draft) else None
        self._await_verdict(input_ids, len(draft), start)
        tokens = draft.tokens.to(input_ids.device)
        return torch.cat([input_ids, tokens[None]], dim=1), None if law is None else law[None]

    def _draft(self, input_ids: torch.LongTensor, budget: int) -> Draft:
        """The draft after `input_ids`, of at most `budget` tokens, cut at EOS and before stop strings."""
        nothing = Draft(input_ids.new_empty(0))
        context = _attended_tokens(input_ids, self._attention_mask)
        if budget < 1 or context.shape[0] == 0 or self._has_failed:
            return nothing
        try:
            draft = self._draft_from(context, min(self.options.num_assistant_tokens, budget))
            draft = nothing if draft is None else self._cut(input_ids, draft)
            self._prepare_next(context, draft, budget)
        except Exception as error:
            self._fail(error)
            return nothing
        return draft

    def _draft_from(self, context: torch.LongTensor, num_tokens: int) -> Draft | None:
        """The draft after a text without padding, or `None`."""
        self._session.prepare()
        return self._session.draft(context, num_tokens)

    def _prepare_next(self, context: torch.LongTensor, draft: Draft, budget: int):
        """What can be done for the round after this one, before the verification."""

    def _fail(self, error: Exception):
        """Ends drafting, with one warning, or the generation; the output is right in any case."""
        self.stats.num_errors += 1
        self._has_failed = True
        if self.options.on_draft_error == "raise":
            raise RuntimeError(f"Drafting failed ({type(error).__name__}: {error}).") from error
        logger.warning(
            f"Drafting failed ({type(error).__name__}: {error}): the rest of this generation runs without drafts."
        )

    def _cut(self, input_ids: torch.LongTensor, draft: Draft) -> Draft:
        eos_token_ids = self._eos_token_ids
        if eos_token_ids is not None:
            eos_token_ids = eos_token_ids.to(draft.tokens.device)
        draft = draft.cut(length_through_eos(draft.tokens, eos_token_ids))
        if self._stop_criteria is not None:
            tokens = draft.tokens.to(input_ids.device)
            draft = draft.cut(length_before_stop(input_ids, tokens, self._completes_stop_string))
        return draft

    def _rope_budget(self, input_ids: torch.LongTensor) -> int:
        """
        Draft tokens that leave the target's RoPE what it is in plain decoding. Where it goes by the length of the
        pass, drafted tokens would change the encoding of those before them, and so what the target itself chooses.
        """
        unbounded = self.options.num_assistant_tokens
        if self._rope_limit is None:
            return unbounded
        num_context = _attended_tokens(input_ids, self._attention_mask).shape[0]
        if num_context <= self._rope_limit:
            return self._rope_limit - num_context
        if self._is_steady_beyond:
            return unbounded
        if not self._is_past_rope_limit:
            self._is_past_rope_limit = True
            logger.warning(
                f"The text outgrows {self._rope_limit} tokens, from where on the target's dynamic RoPE changes with "
                f"every token: the rest of this generation runs without drafts."
            )
        return 0

    def _await_verdict(self, input_ids: torch.LongTensor, num_drafted: int, start: float):
        self._num_known = input_ids.shape[1]
        self._verify_start = time.perf_counter()
        self.stats.record_draft(num_drafted, 1e3 * (self._verify_start - start))

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor | None, num_matches: int):
        """Counts the round by its new tokens; `num_matches` does not say the same in all releases."""
        num_new_tokens = input_ids.shape[1] - self._num_known
        if num_new_tokens:
            self.stats.record_verdict(num_new_tokens, self._verify_start, time.perf_counter())

    def close(self):
        """Frees the drafter's cache; called however the generation ends. Idempotent."""
        self._session.close()

    def _completes_stop_string(self, input_ids: torch.LongTensor) -> bool:
        return bool(self._stop_criteria(input_ids, None)[0])

    def _placeholder(self) -> Draft:
        """A draft of one token that ends no generation if it happens to be accepted."""
        ends = [] if self._eos_token_ids is None else self._eos_token_ids.tolist()
        token = next(token for token in range(len(ends) + 1) if token not in ends)
        return Draft(torch.tensor([token], device="cpu"))


class StockAssistant:
    """
    A generator behind transformers' stock assistant protocol, the fallback where the generation hook is not installed.
    It rides in the slot of the assistant's KV cache, where it is asked for its length and told to crop; it goes by the
    text of the next call instead. No verdict reaches it after the last draft, so the statistics lack the last round.
    """

    def __init__(self, generator: D3DCandidateGenerator, vocab_size: int):
        self._generator = generator
        self._vocab_size = vocab_size

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._generator._session.num_cached

    def crop(self, tokens_to_remove: int):
        pass

    def draft(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None, max_new_tokens: int):
        """One round: an object with what the protocol reads. A law is handed over in any case, one-hot if need be."""
        generator, start = self._generator, time.perf_counter()
        if generator._num_known is not None:
            generator.update_candidate_strategy(input_ids, None, 0)
        generator._attention_mask = attention_mask
        draft = generator._draft(input_ids, max_new_tokens)
        if len(draft) == 0:
            draft = generator._placeholder()
        generator._await_verdict(input_ids, len(draft), start)
        tokens = draft.tokens.to(input_ids.device)
        law = one_hot_law(tokens, self._vocab_size) if draft.law is None else draft.law
        return SimpleNamespace(
            sequences=torch.cat([input_ids, tokens[None]], dim=1),
            scores=tuple(row[None] for row in law),
            cache=self,
            past_key_values=self,
        )


def make_candidate_generator(
    drafter,
    target,
    generation_config: GenerationConfig,
    model_kwargs: dict,
    target_tokenizer=None,
) -> D3DCandidateGenerator:
    """
    The generator for one call of `target.generate(..., assistant_model=drafter)`. Its statistics become
    `drafter.last_generation_stats` at once and are kept up to date.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The model that drafts.
        target (`PreTrainedModel`): The model that verifies.
        generation_config (`GenerationConfig`): The call's, as prepared by transformers.
        model_kwargs (`dict`): The call's, of which the attention mask is read.
        target_tokenizer (*optional*): The target's tokenizer, needed for stop strings.
    """
    stop_criteria = None
    if generation_config.stop_strings is not None:
        stop_criteria = StopStringCriteria(tokenizer=target_tokenizer, stop_strings=generation_config.stop_strings)
    options = DraftingOptions.resolve(generation_config, drafter.generation_config, drafter.config.block_size)
    make = D3DCandidateGenerator if options.drafting_mode == "sync" else _package_generator(options.drafting_mode)
    generator = make(
        drafter,
        generation_config,
        attention_mask=model_kwargs.get("attention_mask"),
        stop_criteria=stop_criteria,
        vocab_size=target.config.get_text_config().vocab_size,
        target_config=target.config.get_text_config(),
    )
    drafter.last_generation_stats = generator.stats
    return generator


def _package_generator(drafting_mode: str) -> type[D3DCandidateGenerator]:
    """The generator of a mode that comes with the package, not with code loaded from a repository."""
    try:
        from d3d_hf.decoding import AsyncCandidateGenerator, AutoCandidateGenerator
    except ImportError:
        if drafting_mode == "async":
            logger.warning(
                "drafting_mode='async' needs the d3d_hf package: pip install d3d_hf. Drafting synchronously."
            )
        return D3DCandidateGenerator
    return {"async": AsyncCandidateGenerator, "auto": AutoCandidateGenerator}[drafting_mode]


def generate_as_assistant(
    drafter, input_ids: torch.LongTensor, generation_config: GenerationConfig, max_new_tokens: int, **kwargs
) -> SimpleNamespace:
    """
    Answers one call that transformers' `AssistedCandidateGenerator` makes of an assistant's `generate`.

    Args:
        drafter ([`D3DDrafterForCausalLM`]): The model that drafts.
        input_ids (`torch.LongTensor` of shape `(1, length)`): The whole text so far.
        generation_config (`GenerationConfig`): The assistant's copy of the call's.
        max_new_tokens (`int`): Draft tokens asked for, at least 1.

    Returns:
        An object with `sequences`, `scores`, and the protocol's state under `cache` and `past_key_values`.

    Raises:
        ValueError: Stop strings, which this protocol cannot end on exactly; a batch size above 1.
    """
    if generation_config.stop_strings is not None:
        raise ValueError(
            f"stop_strings={generation_config.stop_strings!r} cannot be honoured exactly by transformers' stock "
            f"assistant protocol: install the generation hook (d3d_hf.install_generation_hook()), or call generate "
            f"without assistant_model."
        )
    if input_ids.shape[0] != 1:
        raise ValueError(f"The batch size is {input_ids.shape[0]}: assisted generation takes one sequence at a time.")
    state = kwargs.get("cache") or kwargs.get("past_key_values")
    if state is None:
        vocab_size = drafter.config.vocab_size
        generator = D3DCandidateGenerator(drafter, generation_config, None, None, vocab_size)
        drafter.last_generation_stats = generator.stats
        state = StockAssistant(generator, vocab_size)
    return state.draft(input_ids, kwargs.get("attention_mask"), max_new_tokens)


def _eos_token_ids(generation_config: GenerationConfig) -> torch.LongTensor | None:
    eos = generation_config.eos_token_id
    if eos is None:
        return None
    return torch.as_tensor(eos, dtype=torch.long, device="cpu").reshape(-1)


def _attended_tokens(input_ids: torch.LongTensor, attention_mask: torch.Tensor | None) -> torch.LongTensor:
    """Tokens of shape `(length,)` without padding; text beyond the mask's end is never padding."""
    tokens = input_ids[0]
    if attention_mask is None:
        return tokens
    is_token = torch.ones_like(tokens, dtype=torch.bool)
    prompt_length = min(attention_mask.shape[1], tokens.shape[0])
    is_token[:prompt_length] = attention_mask[0, :prompt_length].to(tokens.device).bool()
    return tokens[is_token]


__all__ = ["D3DCandidateGenerator", "StockAssistant", "generate_as_assistant", "make_candidate_generator"]
