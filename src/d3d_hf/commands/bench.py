"""`d3d-hf bench`: methods of generating, measured side by side on benchmark prompts."""

import argparse
import glob
import os
import sys

from .arguments import UsageError, one_line
from .bench_contestants import set_up
from .bench_options import acceptance_profile, add_options, names_of_drafters, refuse_conflicts


def add_command(commands):
    parser = commands.add_parser(
        "bench",
        help="measure methods side by side on benchmark prompts",
        description="Plays prompts through plain generation, transformers' own ways of drafting and D3D, interleaved "
        "prompt by prompt, and writes speeds, acceptance and whether the ids are plain generation's. A run that was "
        "ended goes on with the same command; `accelerate launch -m d3d_hf.cli bench ...` shares out the prompts.",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.page is not None or args.sources is not None:
        return _write_page(args)
    profile = acceptance_profile(args.acceptance)
    refuse_conflicts(args, profile)
    from transformers.utils import logging as transformers_logging

    from ..bench.methods import parse_methods

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    names = names_of_drafters(args.drafter)
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


def _measure(args: argparse.Namespace, methods, names: list[str], profile: list[float] | None) -> int:
    import torch
    from accelerate import PartialState

    from ..bench.methods import decoding_config
    from ..bench.runner import RowStore, Runner

    state = PartialState(cpu=args.device == "cpu" or not torch.cuda.is_available())
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    contestants, template, prompt_sets, tokenizer = set_up(args, names, profile, state)
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
