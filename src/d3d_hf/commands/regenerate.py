"""`d3d-hf regenerate`: writes a target's own answers to a prompt set, the data that drafters are trained on."""

import argparse
import os
import sys

from .arguments import UsageError, one_line, option, real_number, template_settings, whole_number


_OF_TRANSFORMERS = ("batch_size", "dtype", "device", "attn_implementation")
_OF_SERVERS = ("base_url", "api_key_env", "model", "concurrency", "tokenizer")


def add_command(commands):
    parser = commands.add_parser(
        "regenerate",
        help="write a target's own answers to a prompt set, to train on",
        description="Writes a target's own answers to a prompt set into a folder of JSONL shards. After an "
        "interruption the same command goes on where it was. Under `accelerate launch -m d3d_hf.cli regenerate ...` "
        "the processes share the prompts.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target", metavar="NAME", help="folder or Hub name (default: HuggingFaceTB/SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--output", metavar="FOLDER", required=True)

    prompts = parser.add_argument_group(
        "prompts", "Rows hold turns (a list of user turns), messages, prompt or question."
    )
    prompts.add_argument(
        "--prompts", metavar="SOURCE", required=True, help=".jsonl or .json file, or a dataset's name on the Hub"
    )
    prompts.add_argument("--prompt-column", metavar="NAME", help="(default: the first of those above)")
    prompts.add_argument("--split", default="train", help="of a dataset on the Hub (default: %(default)s)")
    prompts.add_argument("--subset", metavar="NAME", help="of a dataset on the Hub")
    prompts.add_argument("--max-samples", type=whole_number(1), metavar="N", help="the first N prompts alone")
    prompts.add_argument("--system", metavar="TEXT", help="system message of prompts that have none")
    prompts.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="setting of the chat template, e.g. enable_thinking=false; may be given several times",
    )

    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--max-new-tokens", type=whole_number(1), default=512, metavar="N", help="(default: %(default)s)"
    )
    decoding.add_argument(
        "--temperature", type=real_number(0), default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    decoding.add_argument("--top-p", type=real_number(0, 1), default=1.0, metavar="P", help="1 is off (default: 1)")
    decoding.add_argument("--top-k", type=whole_number(0), default=0, metavar="K", help="0 is off (default: 0)")
    decoding.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="(default: %(default)s)")

    parser.add_argument(
        "--engine",
        choices=("transformers", "openai"),
        default="transformers",
        help="transformers' batched generate, or a server with OpenAI's interface (default: %(default)s)",
    )
    local = parser.add_argument_group("with --engine transformers")
    local.add_argument("--batch-size", type=whole_number(1), metavar="N", help="answers at once (default: 8)")
    local.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="(default: auto)")
    local.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    local.add_argument("--attn-implementation", metavar="NAME", help="eager, sdpa, ... (default: the model's)")
    server = parser.add_argument_group(
        "with --engine openai",
        "--target names the model whose answers these are, and whose tokenizer they are stored with.",
    )
    server.add_argument("--base-url", metavar="URL", help="e.g. http://localhost:8000/v1")
    server.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    server.add_argument("--model", metavar="NAME", help="the server's name of the model (default: --target)")
    server.add_argument("--concurrency", type=whole_number(1), metavar="N", help="requests at once (default: 16)")
    server.add_argument("--tokenizer", metavar="NAME", help="folder or Hub name (default: --target)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that the target's repository brings"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = template_settings(args.template_arg)
    api_key = _refuse_conflicts(args)
    from ..training.answer_decoding import Decoding
    from ..training.chat_server import ServerError
    from ..training.prompts import load_prompts
    from ..training.regenerate import regenerate

    try:
        decoding = Decoding(args.max_new_tokens, args.temperature, args.top_p, args.top_k, args.seed)
        prompts = load_prompts(args.prompts, args.prompt_column, args.max_samples, args.split, args.subset)
    except (ValueError, ImportError) as error:
        raise UsageError(one_line(error)) from error
    import torch
    from accelerate import PartialState
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    state = PartialState(cpu=args.device == "cpu" or not torch.cuda.is_available())
    target, engine, template = _make_engine(args, decoding, settings, api_key, state)
    is_file = os.path.isfile(args.prompts)
    try:
        summary = regenerate(
            engine,
            template,
            prompts,
            args.output,
            target,
            # Of a file its name alone: the metadata go where the data go.
            os.path.basename(args.prompts) if is_file else args.prompts,
            state.process_index,
            state.num_processes,
            state.wait_for_everyone,
            shows_progress=state.is_main_process and sys.stderr.isatty(),
        )
    except ValueError as error:
        raise UsageError(one_line(error, max_length=1000)) from error
    except ServerError as error:
        print(
            f"d3d-hf: error: {one_line(error)}. What was answered is kept: the same command goes on from there.",
            file=sys.stderr,
        )
        return 1
    print(_summary_line(summary, state, args.output), file=sys.stderr)
    return 0


def _refuse_conflicts(args: argparse.Namespace) -> str | None:
    """Refuses what cannot be, and gives the server's key."""
    is_server = args.engine == "openai"
    for name in _OF_TRANSFORMERS if is_server else _OF_SERVERS:
        value = getattr(args, name)
        if value is not None:
            other = "transformers" if is_server else "openai"
            raise UsageError(
                f"{option(name)} {value!r} is for --engine {other}, and the engine is {args.engine!r}: "
                f"leave it out, or give --engine {other}"
            )
    if not is_server:
        return None
    if args.base_url is None:
        raise UsageError("--engine openai needs --base-url: give one like http://localhost:8000/v1")
    if args.target is None:
        raise UsageError("--engine openai needs --target: give the name of the model that the server runs")
    if args.api_key_env is None:
        return None
    api_key = os.environ.get(args.api_key_env)
    if not api_key:
        raise UsageError(
            f"--api-key-env {args.api_key_env!r} names an environment variable that is not set: set it to the key"
        )
    return api_key


def _make_engine(args: argparse.Namespace, decoding, settings: dict, api_key: str | None, state):
    """The target's name, what answers, and the template."""
    from .. import embedded
    from ..training.chat_server import ChatServer
    from ..training.chat_template import Template
    from ..training.server_engine import ServerEngine
    from ..training.transformers_engine import TransformersEngine
    from .loading import load_target, load_tokenizer, usable_device

    target = args.target or embedded.TARGET_NAME
    try:
        if args.engine == "openai":
            server = ChatServer(args.base_url, args.model or target, api_key)
            argument = "--target" if args.tokenizer is None else "--tokenizer"
            tokenizer = load_tokenizer(args.tokenizer or target, argument, args.trust_remote_code)
            template = Template(tokenizer, settings, args.system)
            vocab_size = _vocab_size(args.tokenizer or target, args.trust_remote_code)
            return target, ServerEngine(server, template, decoding, args.concurrency or 16, vocab_size), template
        if args.device is None and state.num_processes > 1:
            device = state.device
        else:
            device = usable_device(args.device)
        model, tokenizer = load_target(
            target, args.dtype or "auto", device, args.attn_implementation, args.trust_remote_code
        )
        template = Template(tokenizer, settings, args.system)
        return target, TransformersEngine(model, tokenizer, decoding, args.batch_size or 8), template
    except ValueError as error:
        raise UsageError(one_line(error)) from error


def _vocab_size(name: str, trust_remote_code: bool) -> int | None:
    """The target's, from its config; `None` where there is only a tokenizer."""
    from transformers import AutoConfig

    from .. import embedded

    try:
        config = AutoConfig.from_pretrained(embedded.resolve(name), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):
        return None
    return getattr(config.get_text_config(decoder=True), "vocab_size", None)


def _summary_line(summary, state, output: str) -> str:
    line = f"{summary.num_rows} answers, {summary.num_tokens} tokens, {summary.tokens_per_second:.1f} tokens/s"
    if summary.num_present:
        line += f"; {summary.num_present} were there already"
    if summary.num_skipped:
        line += f"; {summary.num_skipped} left out as too long"
    if state.num_processes > 1:
        line += f"; process {state.process_index} of {state.num_processes}"
    return f"[{line}] {output}"


__all__ = ["add_command", "run"]
