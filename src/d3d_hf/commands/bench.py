"""`d3d-hf bench`: methods of generating, measured side by side on benchmark prompts."""

import argparse
import glob
import os
import sys

from .arguments import UsageError, one_line, real_number, template_settings, whole_number


_DATASETS = "gsm8k,math500,aime25,humaneval,mbpp,livecodebench,mt-bench"
_METHODS = "plain,prompt-lookup,assisted,dflash,d3d-sync,d3d-async,d3d-auto"
_DRAFTING = ("num_assistant_tokens", "num_bonus_guesses", "draft_slot_budget")
_SHAPE_ONLY = ("prompt_tokens", "block_size")
_PROMPT_TOKENS, _BLOCK_SIZE, _NUM_SAMPLES_OF_SHAPES = 128, 8, 8


def add_command(commands):
    parser = commands.add_parser(
        "bench",
        help="measure methods side by side on benchmark prompts",
        description="Plays prompts through plain generation, transformers' own ways of drafting and D3D, interleaved "
        "prompt by prompt, and writes speeds, acceptance and whether the ids are plain generation's. A run that was "
        "ended goes on with the same command; `accelerate launch -m d3d_hf.cli bench ...` shares out the prompts.",
        allow_abbrev=False,
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        metavar="NAME",
        help="folder or Hub name (default: HuggingFaceTB/SmolLM2-135M-Instruct), or shape:qwen3-8b and the like: "
        "random weights, needs --acceptance",
    )
    models.add_argument(
        "--drafter",
        metavar="NAME",
        action="append",
        default=[],
        help="folder, Hub name, or shape:NAME[:LAYERS]; may be repeated",
    )
    models.add_argument("--dflash", metavar="NAME", help="a DFlash drafter of the target, for the method dflash")
    models.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    models.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    models.add_argument("--drafter-device", metavar="NAME", help="of the D3D drafters (default: the target's)")
    models.add_argument("--attn-implementation", metavar="NAME", help="eager, sdpa, ... (default: the model's)")
    models.add_argument("--trust-remote-code", action="store_true", help="run code that repositories bring")

    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--methods",
        metavar="LIST",
        default=_METHODS,
        help="by commas; with +ct for a compiled target, of D3D with +cd for compiled drafts (on a GPU: CUDA graphs), "
        "e.g. d3d-sync+cd+ct; plain is always measured (default: %(default)s)",
    )
    what.add_argument(
        "--datasets", metavar="LIST", help=f"by commas: names or JSONL files of turns (default: {_DATASETS})"
    )
    what.add_argument(
        "--first", type=whole_number(0), default=0, metavar="N", help="prompt to begin with (default: 0)"
    )
    what.add_argument("--max-samples", type=whole_number(1), metavar="N", help="prompts of each data set at most")
    what.add_argument(
        "--max-new-tokens", type=whole_number(2), default=256, metavar="N", help="of each turn (default: %(default)s)"
    )
    what.add_argument("--temperature", type=real_number(0), default=0.0, metavar="T", help="0 is greedy (default: 0)")
    what.add_argument("--top-k", type=whole_number(0), metavar="K", help="0 is off (default: the target's own)")
    what.add_argument("--top-p", type=real_number(0, 1), metavar="P", help="1 is off (default: the target's own)")
    what.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="of sampling (default: 0)")
    what.add_argument("--threads", type=whole_number(1), metavar="N", help="CPU threads (default: torch's choice)")
    what.add_argument("--template-arg", metavar="KEY=VALUE", action="append", default=[], help="for the chat template")

    drafting = parser.add_argument_group("drafting, of every D3D method")
    drafting.add_argument("--num-assistant-tokens", type=whole_number(1), metavar="N", help="draft tokens per round")
    drafting.add_argument("--num-bonus-guesses", type=whole_number(0), metavar="N", help="of d3d-async and d3d-auto")
    drafting.add_argument("--draft-slot-budget", type=whole_number(1), metavar="N", help="of d3d-async and d3d-auto")

    synthetic = parser.add_argument_group(
        "imposed acceptance",
        "Models do all their work and a script decides what is accepted, so that speed can be measured without "
        "trained drafters. Of the methods without D3D, plain alone runs.",
    )
    synthetic.add_argument(
        "--acceptance",
        metavar="LIST",
        help="chance of each slot of a draft, given the ones before: 0.9,0.85,...; the last one holds for the rest",
    )
    synthetic.add_argument(
        "--prompt-tokens",
        type=whole_number(1),
        metavar="N",
        help=f"with shape: targets, which read random tokens (default: {_PROMPT_TOKENS})",
    )
    synthetic.add_argument(
        "--block-size", type=whole_number(2), metavar="N", help=f"of shape: drafters (default: {_BLOCK_SIZE})"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="FILE", help="JSON of the results; FILE.rows keeps what is done so far")
    output.add_argument("--title", metavar="TEXT", help="heading on the page of results")
    output.add_argument("--page", metavar="FILE", help="measure nothing: write this page from results (--from)")
    output.add_argument("--from", metavar="FILE", nargs="+", dest="sources", help="JSON files for --page")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.page is not None or args.sources is not None:
        return _write_page(args)
    profile = _profile(args.acceptance)
    _refuse_conflicts(args, profile)
    from transformers.utils import logging as transformers_logging

    from ..bench.methods import parse_methods

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    names = _drafter_names(args.drafter)
    try:
        methods = parse_methods(args.methods.split(","), names)
    except ValueError as error:
        raise UsageError(f"--methods {args.methods!r}: {one_line(error)}") from error
    return _measure(args, methods, names, profile)


def _write_page(args: argparse.Namespace) -> int:
    from ..bench.page import read_reports, results_page

    if args.page is None or args.sources is None:
        raise UsageError("--page and --from belong together: give both")
    # A pattern that matched nothing reaches us as it is.
    paths = [path for source in args.sources for path in (glob.glob(source) if "*" in source else [source])]
    try:
        text = results_page(read_reports(sorted(paths, key=os.path.basename)))
        with open(args.page, "w", encoding="utf-8") as file:
            file.write(text)
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    print(f"Wrote {args.page}")
    return 0


def _profile(text: str | None) -> list[float] | None:
    if text is None:
        return None
    from ..cost_model.acceptance import check_probabilities

    try:
        return list(check_probabilities("--acceptance", [float(part) for part in text.split(",")]))
    except ValueError:
        raise UsageError(
            f"--acceptance {text!r} is no list of chances: give numbers from 0 to 1, like 0.9,0.85,0.8"
        ) from None


def _refuse_conflicts(args: argparse.Namespace, profile: list[float] | None):
    from ..bench.models import is_shape

    is_random = is_shape(args.target)
    shapes = [name for name in (args.target, *args.drafter) if is_shape(name)]
    if shapes and profile is None:
        raise UsageError(f"{shapes[0]!r} has random weights, which accept nothing: give --acceptance 0.9,0.85,...")
    if is_random and args.first:
        raise UsageError(f"--first {args.first} is for data sets, and --target {args.target!r} reads random prompts")
    if is_random and args.datasets is not None:
        raise UsageError(
            f"--datasets {args.datasets!r} needs a tokenizer and --target {args.target!r} has none: leave it out, and "
            "give --prompt-tokens N for the length of its random prompts"
        )
    if is_random and not all(map(is_shape, args.drafter)):
        raise UsageError(f"--target {args.target!r} has no vocabulary of its own: give drafters like shape:qwen3-1.7b")
    for name in _SHAPE_ONLY:
        if getattr(args, name) is not None and not shapes:
            raise UsageError(f"{_option(name)} {getattr(args, name)} is for models like shape:qwen3-8b: leave it out")
    if args.temperature == 0:
        for name in ("top_k", "top_p"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"{_option(name)} {getattr(args, name)} does nothing at --temperature 0, which is greedy: give a "
                    "--temperature above 0, or leave it out"
                )
    if args.output is not None:
        folder = os.path.dirname(args.output) or "."
        if os.path.isdir(args.output) or not os.path.isdir(folder):
            raise UsageError(
                f"--output {args.output!r} is no file that can be written: give one in an existing folder"
            )
        if os.path.exists(args.output):
            raise UsageError(f"--output {args.output!r} is there already: give another name, or delete it")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _drafter_names(drafters: list[str]) -> list[str]:
    """Short names for the rows, without folders."""
    names = [os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name for name in drafters]
    if len(set(names)) < len(names):
        raise UsageError(f"--drafter: {', '.join(drafters)} would have the same name in the results: rename a folder")
    return names


def _measure(args: argparse.Namespace, methods, names: list[str], profile: list[float] | None) -> int:
    import torch
    from accelerate import PartialState

    from ..bench.methods import decoding_config
    from ..bench.runner import RowStore, Runner

    state = PartialState(cpu=args.device == "cpu" or not torch.cuda.is_available())
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    contestants, template, prompt_sets, tokenizer = _set_up(args, names, profile, state)
    target = contestants.target
    config = decoding_config(
        target,
        args.max_new_tokens,
        args.temperature,
        args.top_k,
        args.top_p,
        getattr(tokenizer, "pad_token_id", None),
    )
    settings = _settings(args, methods, contestants, prompt_sets, profile)
    store = None
    folder = None if args.output is None else f"{args.output}.rows"
    try:
        if state.is_main_process:
            store = _open(RowStore, folder, settings, 0)
        state.wait_for_everyone()
        store = store or _open(RowStore, folder, settings, state.process_index)
        runner = Runner(contestants, methods, template, config, args.seed)
        _play(runner, prompt_sets, store, state)
        state.wait_for_everyone()
        if state.is_main_process:
            _finish(args, settings, store, contestants, state)
    except ValueError as error:
        raise UsageError(one_line(error, max_length=1000)) from error
    return 0


def _open(store_class, folder: str | None, settings: dict, process_index: int):
    import tempfile

    return store_class(folder or tempfile.mkdtemp(prefix="d3d-bench-"), settings, process_index)


def _set_up(args: argparse.Namespace, names: list[str], profile: list[float] | None, state):
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
        sources = (args.datasets or _DATASETS).split(",")
        try:
            prompt_sets = [load_prompt_set(source, args.max_samples, args.first) for source in sources]
        except (ValueError, ImportError) as error:
            raise UsageError(f"--datasets {args.datasets or _DATASETS!r}: {one_line(error)}") from error
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
    num_tokens = args.prompt_tokens or _PROMPT_TOKENS
    target = random_target(config, _dtype(args.dtype), device)
    template = RandomTokens(config.vocab_size, num_tokens)
    return target, template, [random_prompts(args.max_samples or _NUM_SAMPLES_OF_SHAPES, num_tokens)], None


def _load_drafter(args: argparse.Namespace, name: str, target, device):
    from ..bench.models import is_shape, parse_shape, random_drafter
    from .loading import load_drafter, read_drafter_config

    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if is_shape(name):
        try:
            return random_drafter(parse_shape(name), target.dtype, device, vocab_size, args.block_size or _BLOCK_SIZE)
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


def _settings(args: argparse.Namespace, methods, contestants, prompt_sets, profile: list[float] | None) -> dict:
    """What the results hang on; a run is taken up again only where it is the same."""
    import torch

    from .. import embedded
    from ..training.provenance import portable_command, versions

    target = args.target or embedded.TARGET_NAME
    return {
        "target": portable_command([target])[0],
        "drafters": {
            name: {"num_layers": drafter.config.num_hidden_layers, "block_size": drafter.config.block_size}
            for name, drafter in contestants.drafters.items()
        },
        "dflash": None if args.dflash is None else os.path.basename(os.path.normpath(args.dflash)),
        "methods": [method.name for method in methods],
        "datasets": {
            prompt_set.name: {"num_prompts": len(prompt_set.prompts), "digest": prompt_set.digest}
            for prompt_set in prompt_sets
        },
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
        "drafting": contestants.drafting,
        "acceptance": profile,
        "dtype": str(contestants.target.dtype).removeprefix("torch."),
        "device": contestants.target.device.type,
        "drafter_device": args.drafter_device,
        "num_threads": torch.get_num_threads(),
        "versions": versions(),
    }


def _play(runner, prompt_sets, store, state):
    from tqdm import tqdm

    total = sum(len(prompts.prompts[state.process_index :: state.num_processes]) for prompts in prompt_sets)
    is_shown = None if state.is_main_process else True  # of tqdm: disabled where stderr is no terminal
    with tqdm(total=total, unit="prompt", disable=is_shown, file=sys.stderr) as bar:

        def advance(dataset: str):
            bar.set_description(dataset)
            bar.update()

        runner.run(prompt_sets, store, state.process_index, state.num_processes, advance)


def _finish(args: argparse.Namespace, settings: dict, store, contestants, state):
    from ..bench.report import averages, print_table, rounded, summarise
    from ..bench.runner import WARM_UP_TOKENS
    from ..pruning.resumable_run import write_json
    from ..training.provenance import provenance

    order = {name: place for place, name in enumerate(settings["datasets"])}
    methods = {name: place for place, name in enumerate(settings["methods"])}
    rows = sorted(store.rows(), key=lambda row: (order[row["dataset"]], methods[row["method"]], row["prompt"]))
    results = summarise(rows, is_greedy=args.temperature == 0)
    print_table(results)
    report = {
        "title": args.title or ", ".join(settings["datasets"]),
        "results": rounded(results),
        "averages": rounded(averages(results)),
        "settings": settings,
        "warm_up": f"{WARM_UP_TOKENS} tokens of the first prompt by every method, not counted",
        "num_processes": state.num_processes,
        **provenance(args.argv),
    }
    report["machine"]["device"] = str(contestants.target.device)
    if args.output is not None:
        write_json(args.output, report, indent=1)
        print(f"Wrote {args.output}", file=sys.stderr)
    store.close()


__all__ = ["add_command", "run"]
