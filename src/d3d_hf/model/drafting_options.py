"""The options of one generation: where they come from and which of two settings wins."""

from dataclasses import dataclass

from transformers import GenerationConfig


DRAFTING_MODES = ("auto", "sync", "async")
GUESS_SOURCES = ("autoregressive", "slots")
ERROR_ACTIONS = ("warn", "raise")
# transformers fills in this value when nobody sets num_assistant_tokens, so it reads as "not given".
_UNSET_NUM_ASSISTANT_TOKENS = 20


@dataclass(frozen=True)
class DraftingOptions:
    """
    Options of one generation. Each is looked up in the `GenerationConfig` of the call (where the target's own
    generation config has been merged in by transformers), then in the drafter's `generation_config`, then takes the
    default. `num_assistant_tokens=20` in the call reads as not given, since that is what transformers fills in.

    Attributes:
        num_assistant_tokens (`int`): Draft tokens per round, at most `block_size` (the default).
        draft_tree_size (`int` or `"auto"`, defaults to `"auto"`):
            Nodes of a draft tree, 0 for a chain; `"auto"` takes what promises most tokens per second.
        draft_from_text (`bool`, defaults to `True`):
            Whether what followed in the text, where it stood as it stands now, is drafted beside the drafter's words.
        num_denoising_steps (`int`, defaults to 1): Forwards that one synchronous draft is spread over, left to right.
        drafting_mode (`str`, defaults to `"auto"`):
            `"sync"` drafts after each verdict; `"async"` drafts for every verdict while the target is verifying;
            `"auto"` measures and takes what is fastest, not drafting at all included.
        num_bonus_guesses (`int`, defaults to 3): Asynchronous: guesses of the bonus for each verdict.
        bonus_guess_source (`str`, defaults to `"autoregressive"`):
            Asynchronous: whether guesses come from a first small forward over the tokens under verification, or, for
            nothing but of less use, from the laws of their own slots (`"slots"`).
        draft_slot_budget (`int`, *optional*): Asynchronous: slots of one packed pass at most; no bound by default.
        compile_drafter (`bool` or `"auto"`, defaults to `"auto"`):
            Whether drafting runs compiled, or as CUDA graphs. On a CPU `"auto"` does so after `drafter.warmup()`, or
            once drafting eagerly has lost more time in this process than compiling takes; on a GPU always.
        on_draft_error (`str`, defaults to `"warn"`):
            Whether a failure to draft ends drafting, with one warning, or the generation (`"raise"`).
    """

    num_assistant_tokens: int
    draft_tree_size: int | str = "auto"
    draft_from_text: bool = True
    num_denoising_steps: int = 1
    drafting_mode: str = "auto"
    num_bonus_guesses: int = 3
    bonus_guess_source: str = "autoregressive"
    draft_slot_budget: int | None = None
    compile_drafter: bool | str = "auto"
    on_draft_error: str = "warn"

    def max_branches(self, block_size: int) -> int:
        """Branches of a packed pass: one for each verdict on a whole chain and each guess, within the budget."""
        num_branches = (self.num_assistant_tokens + 1) * (1 + self.num_bonus_guesses)
        return (
            num_branches if self.draft_slot_budget is None else min(num_branches, self.draft_slot_budget // block_size)
        )

    def num_packed_tokens(self, block_size: int) -> int:
        """Tokens of a packed pass over a whole draft."""
        return self.num_assistant_tokens + 1 + self.max_branches(block_size) * block_size

    @classmethod
    def resolve(cls, call_config: GenerationConfig, drafter_config: GenerationConfig, block_size: int):
        """
        Raises:
            ValueError: An option has a value that drafting cannot use.
        """

        def look_up(name, default, unset=None):
            for config, unset_value in ((call_config, unset), (drafter_config, None)):
                value = getattr(config, name, None)
                if value is not None and value != unset_value:
                    return value
            return default

        num_tokens = look_up("num_assistant_tokens", block_size, unset=_UNSET_NUM_ASSISTANT_TOKENS)
        num_steps = look_up("num_denoising_steps", cls.num_denoising_steps)
        tree_size = look_up("draft_tree_size", cls.draft_tree_size)
        num_guesses = look_up("num_bonus_guesses", cls.num_bonus_guesses)
        slot_budget = look_up("draft_slot_budget", cls.draft_slot_budget)
        for name, value, least in (
            ("num_assistant_tokens", num_tokens, 1),
            ("num_denoising_steps", num_steps, 1),
            ("draft_tree_size", tree_size, 0),
            ("num_bonus_guesses", num_guesses, 0),
            ("draft_slot_budget", slot_budget, block_size),
        ):
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if name == "draft_tree_size" and value == "auto":
                continue
            if value is not None and not (is_whole and value >= least):
                raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}.")
        choices = {}
        for name, allowed in (
            ("drafting_mode", DRAFTING_MODES),
            ("bonus_guess_source", GUESS_SOURCES),
            ("compile_drafter", ("auto", True, False)),
            ("on_draft_error", ERROR_ACTIONS),
            ("draft_from_text", (True, False)),
        ):
            choices[name] = look_up(name, getattr(cls, name))
            if choices[name] not in allowed or not isinstance(choices[name], (str, bool)):
                raise ValueError(f"{name} is {choices[name]!r}: choose one of {allowed}.")
        return cls(
            num_assistant_tokens=min(num_tokens, block_size),
            num_denoising_steps=min(num_steps, block_size),
            draft_tree_size=tree_size,
            num_bonus_guesses=num_guesses,
            draft_slot_budget=slot_budget,
            **choices,
        )


__all__ = ["DRAFTING_MODES", "DraftingOptions"]
