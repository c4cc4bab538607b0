"""What is compared: each method is a name, what it needs, and how it asks `generate`."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..model.modeling_d3d import D3DDrafterForCausalLM
from .synthetic import ImposedAcceptance


PROMPT_LOOKUP_TOKENS = 10
COMPILED_TARGET, COMPILED_DRAFTER = "+ct", "+cd"


class CannotRunError(Exception):
    """Why a method cannot run here, for its row."""


@dataclass
class Contestants:
    """
    The models of a comparison.

    Attributes:
        target (`PreTrainedModel`): The model that answers.
        drafters (`dict[str, D3DDrafterForCausalLM]`): By the names that rows show.
        dflash (`PreTrainedModel`, *optional*): A DFlash drafter for transformers' own loop.
        drafting (`dict`): Drafting options of every D3D method, as in [`DraftingOptions`].
        imposed ([`ImposedAcceptance`], *optional*): Imposed on the target and on D3D drafts from the beginning.
        max_context (`int`): Tokens of the longest text; what is compiled is compiled for this.
    """

    target: PreTrainedModel
    drafters: dict[str, D3DDrafterForCausalLM] = field(default_factory=dict)
    dflash: PreTrainedModel | None = None
    drafting: dict = field(default_factory=dict)
    imposed: ImposedAcceptance | None = None
    max_context: int = 1024
    _compiled: PreTrainedModel | None = None
    _warm: set[str] = field(default_factory=set)

    def __post_init__(self):
        if self.imposed is not None:
            self.imposed.impose_on_target(self.target)
            for drafter in self.drafters.values():
                self.imposed.impose_on_drafter(drafter)

    def compiled_target(self) -> PreTrainedModel:
        """A second copy of the target, compiled when it is first asked for; on a GPU, CUDA graphs."""
        if self._compiled is None:
            from ..compiled import compile_target

            twin = copy.deepcopy(self.target)
            twin.__dict__.pop("forward", None)  # what is imposed on the target calls the target
            if compile_target(twin, max_context=self.max_context).__class__ is self.target.__class__:
                raise CannotRunError(f"{type(self.target).__name__} on {self.target.device} cannot be compiled")
            if self.imposed is not None:
                self.imposed.impose_on_target(twin)
            self._compiled = twin
        return self._compiled

    def warm_drafter(self, name: str) -> D3DDrafterForCausalLM:
        """A drafter whose passes are compiled; on a GPU, CUDA graphs."""
        drafter = self.drafters[name]
        if name not in self._warm:
            from ..compiled.drafter import compiled_drafter

            drafter.warmup(max_context=self.max_context)
            if compiled_drafter(drafter).reason is not None:
                raise CannotRunError(f"the drafter cannot be compiled: {compiled_drafter(drafter).reason}")
            self._warm.add(name)
        return drafter


@dataclass(frozen=True)
class Call:
    """
    How a method generates.

    Attributes:
        target (`PreTrainedModel`): What `generate` is called on.
        options (`dict`): Set on the call's `GenerationConfig`.
        assistant (`PreTrainedModel`, *optional*): Given as `assistant_model`.
    """

    target: PreTrainedModel
    options: dict = field(default_factory=dict)
    assistant: PreTrainedModel | None = None

    def arguments(self, config: GenerationConfig) -> tuple[GenerationConfig, dict]:
        """The call's config and further arguments of `generate`, from a config that all methods share."""
        config = copy.deepcopy(config)
        for name, value in self.options.items():
            setattr(config, name, value)
        return config, {} if self.assistant is None else {"assistant_model": self.assistant}

    @property
    def weights_bytes(self) -> int:
        """Memory of the parameters of the models at work, shared ones counted once."""
        models = (self.target,) if self.assistant is None else (self.target, self.assistant)
        parameters = {p.data_ptr(): p.nbytes for model in models for p in model.parameters()}
        return sum(parameters.values())


def _plain(contestants: Contestants, drafter: str | None) -> Call:
    return Call(contestants.target)


def _prompt_lookup(contestants: Contestants, drafter: str | None) -> Call:
    _refuse_imposed(contestants)
    return Call(contestants.target, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS})


def _assisted(contestants: Contestants, drafter: str | None) -> Call:
    """The drafter's own backbone, one token at a time, under transformers' assisted generation and its defaults."""
    _refuse_imposed(contestants)
    return Call(
        contestants.target, assistant=autoregressive_assistant(contestants.drafters[drafter], contestants.target)
    )


def _dflash(contestants: Contestants, drafter: str | None) -> Call:
    _refuse_imposed(contestants)
    if contestants.dflash is None:
        raise CannotRunError("no DFlash drafter was given (--dflash)")
    if "speculation_type" not in inspect.getsource(GenerationMixin._get_candidate_generator):
        raise CannotRunError("this release of transformers has no DFlash")
    return Call(contestants.target, {"speculation_type": "dflash"}, contestants.dflash)


def _d3d(mode: str) -> Callable[[Contestants, str | None], Call]:
    def call(contestants: Contestants, drafter: str | None) -> Call:
        options = {"drafting_mode": mode, "compile_drafter": False, **contestants.drafting}
        return Call(contestants.target, options, contestants.drafters[drafter])

    return call


def _refuse_imposed(contestants: Contestants):
    if contestants.imposed is not None:
        raise CannotRunError("acceptance is imposed on D3D drafts alone")


_CALLS = {
    "plain": _plain,
    "prompt-lookup": _prompt_lookup,
    "assisted": _assisted,
    "dflash": _dflash,
    "d3d-sync": _d3d("sync"),
    "d3d-async": _d3d("async"),
    "d3d-auto": _d3d("auto"),
}
METHOD_NAMES = tuple(_CALLS)
_OF_DRAFTERS = ("assisted", "d3d-sync", "d3d-async", "d3d-auto")


@dataclass(frozen=True)
class Method:
    """
    One method of a comparison.

    Attributes:
        base (`str`): One of `METHOD_NAMES`.
        drafter (`str`, *optional*): The drafter's name, where the method takes one.
        compiles_target, compiles_drafter (`bool`): Which forwards run compiled.
        is_named (`bool`): Whether `name` tells the drafter: where there are several.
    """

    base: str
    drafter: str | None = None
    compiles_target: bool = False
    compiles_drafter: bool = False
    is_named: bool = False

    @property
    def name(self) -> str:
        """As rows show it: `d3d-sync+cd+ct`, with several drafters `d3d-sync[their-name]+cd+ct`."""
        parts = [self.base]
        if self.is_named:
            parts.append(f"[{self.drafter}]")
        parts += [COMPILED_DRAFTER] * self.compiles_drafter + [COMPILED_TARGET] * self.compiles_target
        return "".join(parts)

    @property
    def is_drafted(self) -> bool:
        """Whether a D3D drafter drafts, which keeps statistics."""
        return self.base.startswith("d3d-")

    def call(self, contestants: Contestants) -> Call:
        """
        What `generate` is to be asked; compiles what has to be compiled.

        Raises:
            CannotRunError: The method cannot run with these models, on this machine or in this release.
        """
        if self.base in _OF_DRAFTERS and self.drafter is None:
            raise CannotRunError("no drafter was given (--drafter)")
        call = _CALLS[self.base](contestants, self.drafter)
        if self.compiles_drafter:
            contestants.warm_drafter(self.drafter)
            call = Call(call.target, {**call.options, "compile_drafter": True}, call.assistant)
        if self.compiles_target:
            call = Call(contestants.compiled_target(), call.options, call.assistant)
        return call


def parse_methods(names: list[str], drafters: list[str]) -> list[Method]:
    """
    Methods by their names; one that takes a drafter stands once for each of them, and "plain" is always among them,
    since every speedup is over it.

    Args:
        names (`list[str]`): Of `METHOD_NAMES`, each with `+cd` (a D3D drafter's passes compiled) and `+ct` (the
            target's forwards compiled) or without.
        drafters (`list[str]`): Their names in the rows.

    Raises:
        ValueError: An unknown name.
    """
    methods = [] if "plain" in names else [Method("plain")]
    for name in names:
        base, *suffixes = name.split("+")
        known = {"cd", "ct"} if base.startswith("d3d-") else {"ct"}
        if base not in _CALLS or not set(suffixes) <= known or len(set(suffixes)) < len(suffixes):
            raise ValueError(
                f"The method is {name!r}: give one of {', '.join(METHOD_NAMES)}, with {COMPILED_TARGET} for a "
                f"compiled target, and of D3D {COMPILED_DRAFTER} for compiled drafts."
            )
        takes_drafter = base in _OF_DRAFTERS
        for drafter in drafters if takes_drafter and drafters else [None]:
            is_named = takes_drafter and len(drafters) > 1
            methods.append(Method(base, drafter, "ct" in suffixes, "cd" in suffixes, is_named))
    return list(dict.fromkeys(methods))


def autoregressive_assistant(drafter: D3DDrafterForCausalLM, target: PreTrainedModel) -> PreTrainedModel:
    """A drafter's backbone as an ordinary causal model that shares its weights, ending texts where the target does."""
    assistant = copy.copy(drafter._backbone).eval()
    assistant.generation_config = GenerationConfig(
        **{name: getattr(target.generation_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    return assistant


def decoding_config(
    target: PreTrainedModel,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    pad_token_id: int | None = None,
) -> GenerationConfig:
    """
    The config that all methods share.

    Args:
        target (`PreTrainedModel`): Whose own generation config gives what is not said here.
        max_new_tokens (`int`): Of one answer.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy.
        top_k, top_p (*optional*): Of sampling; 0 and 1 are off.
        pad_token_id (`int`, *optional*): The tokenizer's, where the target names none.
    """
    own = target.generation_config
    config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=temperature > 0)
    if own.pad_token_id is None:
        eos = own.eos_token_id[0] if isinstance(own.eos_token_id, list) else own.eos_token_id
        config.pad_token_id = eos if pad_token_id is None else pad_token_id
    # Values for greedy decoding that count as unset; the target's own would be warned of.
    config.temperature, config.top_k, config.top_p = temperature or 1.0, 50, 1.0
    if config.do_sample:
        config.top_k = next(value for value in (top_k, own.top_k, 0) if value is not None)
        config.top_p = next(value for value in (top_p, own.top_p, 1.0) if value is not None)
    return config


__all__ = [
    "COMPILED_DRAFTER",
    "COMPILED_TARGET",
    "METHOD_NAMES",
    "PROMPT_LOOKUP_TOKENS",
    "Call",
    "CannotRunError",
    "Contestants",
    "Method",
    "autoregressive_assistant",
    "decoding_config",
    "parse_methods",
]
