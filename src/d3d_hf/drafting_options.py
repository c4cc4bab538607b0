"""The options of one generation: where they come from and which of two settings wins."""

from dataclasses import dataclass

from transformers import GenerationConfig


DRAFTING_MODES = ("sync",)
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
        num_denoising_steps (`int`, defaults to 1): Forwards that one synchronous draft is spread over, left to right.
        drafting_mode (`str`, defaults to `"sync"`): `"sync"` drafts after each verdict.
    """

    num_assistant_tokens: int
    num_denoising_steps: int = 1
    drafting_mode: str = "sync"

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
        mode = look_up("drafting_mode", cls.drafting_mode)
        for name, value in (("num_assistant_tokens", num_tokens), ("num_denoising_steps", num_steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least 1.")
        if mode not in DRAFTING_MODES:
            raise ValueError(f"drafting_mode is {mode!r}: choose one of {DRAFTING_MODES}.")
        return cls(min(num_tokens, block_size), min(num_steps, block_size), mode)


__all__ = ["DRAFTING_MODES", "DraftingOptions"]
