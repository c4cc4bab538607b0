"""The hook into transformers' generate: dispatches to a drafter's own candidate generator and ends what it began.

`generate` has no registry for candidate generators and no callback at its end, so two private methods of
`GenerationMixin` are wrapped once. The dispatch looks for a method that the assistant carries, never for its class,
so that a copy of the drafter's code loaded from a repository works as well; every other assistant goes through
untouched. Where a release no longer has these methods as known, nothing is wrapped and one warning says so: the
drafter then serves transformers' stock assistant protocol.
"""

import contextvars
import functools
import inspect
import logging

from transformers import GenerationMixin


logger = logging.getLogger(__name__)

_MARK = "_d3d_original"
# What the wrappers rely on: methods, and the parameters that they read or pass on by name.
_KNOWN_METHODS = {
    "_get_candidate_generator": ("generation_config", "model_kwargs", "assistant_model", "target_tokenizer"),
    "_assisted_decoding": (
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "assistant_model",
    ),
    "_sample": ("input_ids", "logits_processor", "stopping_criteria", "generation_config"),
}
_WRAPPED_METHODS = ("_get_candidate_generator", "_assisted_decoding")
# Arguments of assisted decoding that plain decoding does not know.
_ASSISTED_ONLY = ("self", "assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor")
# Generators made inside the assisted decoding that runs in this context; `None` outside of one.
_open_generators = contextvars.ContextVar("d3d_open_generators", default=None)


def install_generation_hook() -> bool:
    """
    Wraps `GenerationMixin._get_candidate_generator` and `GenerationMixin._assisted_decoding`. Idempotent, also across
    several copies of this module; never raises.

    Returns:
        `bool`: Whether the hook is in place.
    """
    if is_generation_hook_installed():
        return True
    missing = _missing_parts()
    if missing:
        import transformers

        logger.warning(
            f"transformers {transformers.__version__} has changed {', '.join(missing)}: the D3D generation hook is "
            f"not installed. Drafters work through transformers' stock assistant protocol, without stop strings."
        )
        return False
    for name, wrap in zip(_WRAPPED_METHODS, (_wrap_dispatch, _wrap_decoding)):
        original = getattr(GenerationMixin, name)
        wrapped = wrap(original)
        setattr(wrapped, _MARK, original)
        setattr(GenerationMixin, name, wrapped)
    return True


def uninstall_generation_hook():
    """Puts the wrapped methods back. Does nothing where the hook is not installed."""
    for name in _WRAPPED_METHODS:
        original = getattr(getattr(GenerationMixin, name, None), _MARK, None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def is_generation_hook_installed() -> bool:
    return all(hasattr(getattr(GenerationMixin, name, None), _MARK) for name in _WRAPPED_METHODS)


def _missing_parts() -> list[str]:
    missing = []
    for name, parameters in _KNOWN_METHODS.items():
        method = getattr(GenerationMixin, name, None)
        if method is None:
            missing.append(f"GenerationMixin.{name}")
            continue
        known = inspect.signature(method).parameters
        missing += [f"GenerationMixin.{name}({parameter}=)" for parameter in parameters if parameter not in known]
    return missing


def _carries(assistant, method: str) -> bool:
    """Whether an assistant is a drafter, wrapped by PEFT or torch.compile or not (both forward attribute look-ups)."""
    return assistant is not None and callable(getattr(assistant, method, None))


def _is_outranked(generation_config) -> bool:
    """Whether the call asks for another kind of drafting, which outranks an assistant in transformers and here."""
    options = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp", "speculation_type")
    return any(getattr(generation_config, option, None) for option in options)


def _wrap_dispatch(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _get_candidate_generator(self, *args, **kwargs):
        arguments = signature.bind(self, *args, **kwargs).arguments
        assistant = arguments.get("assistant_model")
        config = arguments["generation_config"]
        if not _carries(assistant, "make_candidate_generator") or _is_outranked(config):
            return original(self, *args, **kwargs)
        generator = assistant.make_candidate_generator(
            target=self,
            generation_config=config,
            model_kwargs=arguments["model_kwargs"],
            target_tokenizer=arguments.get("target_tokenizer"),
            assistant_tokenizer=arguments.get("assistant_tokenizer"),
        )
        opened = _open_generators.get()
        if opened is not None:
            opened.append(generator)
        return generator

    return _get_candidate_generator


def _wrap_decoding(original):
    signature = inspect.signature(original)

    @functools.wraps(original)  # generate reads the signature
    def _assisted_decoding(self, input_ids, *args, **kwargs):
        arguments = signature.bind_partial(self, input_ids, *args).arguments | kwargs
        assistant, config = arguments.get("assistant_model"), arguments["generation_config"]
        if not _carries(assistant, "make_candidate_generator") or _is_outranked(config):
            return original(self, input_ids, *args, **kwargs)
        if not assistant.prepare_call(self, input_ids, config, arguments):
            plain = {name: value for name, value in arguments.items() if name not in _ASSISTED_ONLY}
            return self._sample(**plain)
        opened = []
        token = _open_generators.set(opened)
        try:
            return original(self, input_ids, *args, **kwargs)
        finally:
            _open_generators.reset(token)
            for generator in opened:
                generator.close()

    return _assisted_decoding


__all__ = ["install_generation_hook", "is_generation_hook_installed", "uninstall_generation_hook"]
