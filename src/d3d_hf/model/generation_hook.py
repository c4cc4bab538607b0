"""The seam to transformers' generate: a call with a drafter goes through one of two doors, or runs plain.

`generate` has no registry for ways of decoding, so the private method that it calls for every assistant is wrapped
once. A drafter is known by its `packed_forward`, never by its class, so that a copy of this code that was loaded from
a repository works as well; every other assistant goes through untouched. The doors are

1. the package's own loop (decoding/loop.py), the rule, and
2. a candidate generator inside transformers' own assisted loop (candidate_generator.py), for targets that the loop
   does not take, and for code that came with a repository, without the package.

The seam fails soft. If a door raises before the first new token, and not because of what the caller asked for, a
release of transformers has changed what the door relies on: one warning says so, and the call runs plain. Only what
the caller gave may raise.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import GenerationConfig, GenerationMixin

from .backbones import cache_of
from .drafting_options import DraftingOptions
from .fallbacks import check_call, reason_not_to_draft
from .generation_stats import GenerationStats


logger = logging.getLogger(__name__)

_wrapped = set()
_MARK = "_d3d_original"
_METHOD = "_assisted_decoding"
# Arguments of assisted decoding that plain decoding does not know.
_ASSISTED_ONLY = ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor")
_REQUIRED = ("logits_processor", "stopping_criteria", "generation_config")
_OF_DECODING = (*_REQUIRED, "synced_gpus", "streamer")
_OTHER_DRAFTING = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "speculation_type")


class DraftingError(RuntimeError):
    """Drafting failed, and the caller asked for an error then."""


@dataclass
class Call:
    """
    One call of `target.generate(..., assistant_model=drafter)`, as transformers has prepared it.

    Attributes:
        target (`PreTrainedModel`): The model that verifies.
        drafter ([`D3DDrafterForCausalLM`]): The model that drafts.
        input_ids (`torch.LongTensor` of shape `(batch, length)`): The prompt.
        generation_config (`GenerationConfig`): The call's.
        arguments (`dict`): Of transformers' assisted decoding, by name, `input_ids` left out.
        options ([`DraftingOptions`]): The drafting options.
        stats ([`GenerationStats`]): Becomes `drafter.last_generation_stats`.
        has_begun (`bool`): Whether anything of the caller's has been called: from then on, errors are the caller's.
    """

    target: Any
    drafter: Any
    input_ids: Any
    generation_config: GenerationConfig
    arguments: dict[str, Any]
    options: DraftingOptions
    stats: GenerationStats = field(default_factory=GenerationStats)
    has_begun: bool = False
    generator: Any = None  # the second door's
    noise: Any = None  # of the draws to come, where the loop samples

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """Arguments of the target's forward."""
        own = {*_ASSISTED_ONLY, *_OF_DECODING, *_explicit(getattr(GenerationMixin, _METHOD))}
        return {name: value for name, value in self.arguments.items() if name not in own}


class Door:
    """A way to run a call with drafts."""

    name = ""

    def reason_against(self, call: Call) -> str | None:
        """Why this door does not take a call; `None` if it does."""
        raise NotImplementedError

    def run(self, call: Call, assisted_decoding):
        """What `generate` returns. `assisted_decoding()` is transformers' own loop with the call's arguments."""
        raise NotImplementedError


_doors: list[Door] = []


def open_door(door: Door, first: bool = False):
    """Adds a door, in the place of one of the same name."""
    _doors[:] = [other for other in _doors if other.name != door.name]
    _doors.insert(0 if first else len(_doors), door)


def install_generation_hook() -> bool:
    """
    Wraps `GenerationMixin._assisted_decoding`. Idempotent, also across several copies of this module; never raises.

    Returns:
        `bool`: Whether the hook is in place.
    """
    is_installed = wrap_method(_METHOD, _wrap)
    if not is_installed:
        logger.warning(
            f"transformers {transformers.__version__} has no GenerationMixin.{_METHOD}: the D3D generation hook is "
            f"not installed, and a drafter that is given as assistant_model drafts token by token, if at all. Install "
            f"a release of transformers that the package's metadata names."
        )
    return is_installed


def uninstall_generation_hook():
    """Puts wrapped methods back. Does nothing where the hook is not installed."""
    for name in _wrapped:
        original = getattr(getattr(GenerationMixin, name, None), _MARK, None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def is_generation_hook_installed() -> bool:
    return hasattr(getattr(GenerationMixin, _METHOD, None), _MARK)


def wrap_method(name: str, wrap: Callable) -> bool:
    """Puts `wrap(original)` in the place of a method of `GenerationMixin`, once; whether it stands there."""
    original = getattr(GenerationMixin, name, None)
    if not callable(original):
        return False
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(wrap(original))  # generate reads the signature
        setattr(wrapped, _MARK, original)
        setattr(GenerationMixin, name, wrapped)
    _wrapped.add(name)
    return True


def _wrap(original):
    names = _explicit(original)

    def _assisted_decoding(self, *args, **kwargs):
        arguments = dict(zip(names, args)) | kwargs
        assistant = next(filter(is_drafter, arguments.values()), None)  # by whatever name it is given
        if assistant is None or _is_outranked(arguments.get("generation_config")):
            return original(self, *args, **kwargs)

        def assisted_decoding(**changed):
            return original(self, **{**arguments, **changed})

        def plain():
            left_out = {*_ASSISTED_ONLY, *names} - {*_explicit(GenerationMixin._sample)}
            return self._sample(**{name: value for name, value in arguments.items() if name not in left_out})

        unknown = {*names} & {*arguments} - {*_ASSISTED_ONLY, *_OF_DECODING, "input_ids"}
        return _run(self, assistant, arguments, unknown, assisted_decoding, plain)

    return _assisted_decoding


def _explicit(method) -> list[str]:
    """Parameters that a method names, itself and collected ones left out."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in collected]


def is_drafter(model) -> bool:
    """Whether a model is a drafter, wrapped by PEFT or torch.compile or not: both forward attribute look-ups."""
    return model is not None and callable(getattr(model, "packed_forward", None))


def _is_outranked(generation_config) -> bool:
    """Whether the call asks for another kind of drafting, which outranks an assistant in transformers and here."""
    return any(getattr(generation_config, option, None) for option in _OTHER_DRAFTING)


def _run(target, drafter, arguments: dict, unknown: set[str], assisted_decoding, plain):
    """A call with a drafter, through the first door that takes it. `unknown` are names of arguments."""
    try:
        if unknown:
            raise TypeError(f"{_METHOD} is given {', '.join(sorted(unknown))}, which is not known")
        call = _checked(target, drafter, arguments)
        door = _choose_door(call)
        cache = cache_of(arguments)
        num_cached = None if door is None else cache.get_seq_length()
    except ValueError:  # what the caller asked for
        raise
    except Exception as error:
        _tell_of_change(drafter, "the choice of a door", error)
        return plain()
    if door is None:
        tell_once(drafter, f"Generating without drafts: {call.stats.door_reason}.")
        return plain()
    try:
        return door.run(call, assisted_decoding)
    except DraftingError:
        raise
    except Exception as error:
        if call.has_begun or not _restored(cache, num_cached):
            raise
        _tell_of_change(drafter, f"the {door.name}", error)
    return plain()


def _checked(target, drafter, arguments: dict) -> Call:
    """
    Raises:
        ValueError: The call can never be drafted for, or a drafting option is unusable.
        TypeError: Arguments are missing.
    """
    for name in ("input_ids", "assistant_model", *_REQUIRED):
        if name not in arguments:
            raise TypeError(f"{_METHOD} is given no {name}")
    arguments = dict(arguments)
    input_ids, config = arguments.pop("input_ids"), arguments["generation_config"]
    check_call(drafter, target, arguments)
    options = DraftingOptions.resolve(config, drafter.generation_config, drafter.config.block_size)
    call = Call(target, drafter, input_ids, config, arguments, options)
    _set_stats(drafter, call.stats)
    return call


def _choose_door(call: Call) -> Door | None:
    """The door that takes a call; `None` if it is to run plain. The statistics say why."""
    stats = call.stats
    stats.door_reason = reason_not_to_draft(call.drafter, call.input_ids, call.generation_config, call.arguments)
    for door in _doors if stats.door_reason is None else ():
        reason = door.reason_against(call)
        if reason is None:
            stats.door = door.name
            return door
        stats.door_reason = reason
    stats.door = "plain"
    return None


def _tell_of_change(drafter, failed: str, error: Exception):
    reason = f"{failed} failed ({type(error).__name__}: {error})"
    _set_stats(drafter, GenerationStats(door="plain", door_reason=reason))
    tell_once(
        drafter,
        f"Drafting could not begin on transformers {transformers.__version__}: {type(error).__name__}: {error}. "
        f"The call runs without drafts, with the same result. If it is not your own call that raises this, the "
        f"release has changed what drafting relies on: install one that the package's metadata names, and see "
        f"`d3d-hf doctor`.",
    )


def _set_stats(drafter, stats: GenerationStats):
    """On the drafter itself, which may be wrapped."""
    inner = getattr(drafter, "get_base_model", None)
    (inner() if callable(inner) else getattr(drafter, "_orig_mod", drafter)).last_generation_stats = stats


def _restored(cache, num_cached: int) -> bool:
    """Brings a cache back to its length before the call; whether that was possible."""
    for shorten in (lambda: cache.crop(num_cached - cache.get_seq_length()), lambda: cache.reset()):
        try:
            if cache.get_seq_length() == num_cached:
                return True
            shorten()
            if cache.get_seq_length() == num_cached:
                return True
        except Exception as error:
            logger.debug(f"{type(cache).__name__} cannot be shortened in this way: {error}")
    return False


def tell_once(drafter, message: str):
    """A warning, the first time that it is about this drafter."""
    if message not in drafter._told:
        drafter._told.add(message)
        logger.warning(message)


__all__ = [
    "Call",
    "Door",
    "DraftingError",
    "install_generation_hook",
    "is_drafter",
    "is_generation_hook_installed",
    "open_door",
    "tell_once",
    "uninstall_generation_hook",
    "wrap_method",
]
