"""What `d3d-hf bench` measures: target, drafters and prompts, loaded or made at random."""

import argparse

from .arguments import UsageError, one_line, template_settings
from .bench_options import BLOCK_SIZE, DATASETS, PROMPT_TOKENS


_DRAFTING = ("num_assistant_tokens", "num_bonus_guesses", "draft_slot_budget")
_NUM_SAMPLES_OF_SHAPES = 8


def set_up(args: argparse.Namespace, names: list[str], profile: list[float] | None, state):
    """Models, template and prompts; prompts are read first, as mistakes in them cost the least to find."""
    from .. import embedded
    from ..bench.datasets import load_prompt_set, longest_context, template_of
    from ..bench.methods import Contestants
    from ..bench.models import is_shape, load_dflash
    from ..bench.synthetic import ImposedAcceptance
    from .loading import load_target, read_drafter_config, usable_device

    settings_of_template = template_settings(args.template_arg)
    for name in args.drafter:
        if not is_shape(name):
            read_drafter_config(name, "--drafter")
    device = state.device if args.device is None and state.num_processes > 1 else usable_device(args.device)
    if is_shape(args.target):
        target, template, prompt_sets, tokenizer = _random_target(args, device)
    else:
        sources = (args.datasets or DATASETS).split(",")
        try:
            prompt_sets = [load_prompt_set(source, args.max_samples, args.first) for source in sources]
        except (ValueError, ImportError) as error:
            raise UsageError(f"--datasets {args.datasets or DATASETS!r}: {one_line(error)}") from error
        if len({prompt_set.name for prompt_set in prompt_sets}) < len(prompt_sets):
            raise UsageError(f"--datasets {args.datasets!r} has two sets of the same name: rename a file")
        target, tokenizer = load_target(
            args.target or embedded.TARGET_NAME, args.dtype, device, args.attn_implementation, args.trust_remote_code
        )
        try:
            template = template_of(tokenizer, settings_of_template)
        except ValueError as error:
            raise UsageError(one_line(error)) from error
    beside = device if args.drafter_device is None else usable_device(args.drafter_device, "--drafter-device")
    drafters = {name: _load_drafter(args, path, target, beside) for name, path in zip(names, args.drafter)}
    dflash = None
    if args.dflash is not None:
        try:
            dflash = load_dflash(args.dflash, target, args.dtype, args.trust_remote_code)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UsageError(f"--dflash {args.dflash!r} cannot be used: {one_line(error)}") from error
    max_context = max(longest_context(template, prompts.prompts, args.max_new_tokens) for prompts in prompt_sets)
    imposed = None
    if profile is not None:
        text_config = target.config.get_text_config(decoder=True)
        eos = target.generation_config.eos_token_id
        ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
        imposed = ImposedAcceptance(profile, text_config.vocab_size, ends, max_context + 64)
    drafting = {name: getattr(args, name) for name in _DRAFTING if getattr(args, name) is not None}
    contestants = Contestants(target, drafters, dflash, drafting, imposed, max_context)
    return contestants, template, prompt_sets, tokenizer


def _random_target(args: argparse.Namespace, device):
    from ..bench.datasets import RandomTokens, random_prompts
    from ..bench.models import parse_shape, random_target

    try:
        config = parse_shape(args.target)
    except ValueError as error:
        raise UsageError(f"--target {args.target!r}: {one_line(error)}") from error
    num_tokens = args.prompt_tokens or PROMPT_TOKENS
    target = random_target(config, _dtype(args.dtype), device)
    template = RandomTokens(config.vocab_size, num_tokens)
    return target, template, [random_prompts(args.max_samples or _NUM_SAMPLES_OF_SHAPES, num_tokens)], None


def _load_drafter(args: argparse.Namespace, name: str, target, device):
    from ..bench.models import is_shape, parse_shape, random_drafter
    from .loading import load_drafter, read_drafter_config

    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if is_shape(name):
        try:
            return random_drafter(parse_shape(name), target.dtype, device, vocab_size, args.block_size or BLOCK_SIZE)
        except ValueError as error:
            raise UsageError(f"--drafter {name!r}: {one_line(error)}") from error
    config = read_drafter_config(name, "--drafter")
    if config.vocab_size != vocab_size:
        raise UsageError(
            f"--drafter {name!r} drafts in a vocabulary of {config.vocab_size} tokens and the target has {vocab_size}"
            ": give a drafter of this target"
        )
    # An "auto" of a merged adapter is its base's; all models of a comparison run in the target's.
    dtype = str(target.dtype).removeprefix("torch.") if args.dtype == "auto" else args.dtype
    return load_drafter(name, dtype, device, args.attn_implementation)


def _dtype(name: str):
    import torch

    return torch.bfloat16 if name == "auto" else getattr(torch, name)


__all__ = ["set_up"]
