"""`d3d-hf generate`: answers prompts with a target and a drafter, streaming, and compares with plain generation."""

import argparse
import sys
from dataclasses import asdict, dataclass

from .arguments import UsageError, one_line, option, real_number, whole_number


_SAMPLING_OPTIONS = ("top_k", "top_p", "min_p")
_WARM_UP_TOKENS = 8


def add_command(commands):
    parser = commands.add_parser(
        "generate",
        help="answer a prompt, or chat, with a target and a drafter",
        description="Generates text with a target and a drafter: the target's own text, in fewer of its forwards. The "
        "prompt is --prompt, or standard input, or a conversation with --chat.",
        allow_abbrev=False,
    )
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target", metavar="NAME", help="folder or Hub name (default: HuggingFaceTB/SmolLM2-135M-Instruct)"
    )
    models.add_argument(
        "--drafter",
        metavar="NAME",
        help="folder or Hub name (default: the target's own layers, untrained: about 2 tokens per round)",
    )
    models.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    models.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    models.add_argument(
        "--attn-implementation", metavar="NAME", help="eager, sdpa, ... (default: transformers' choice)"
    )
    models.add_argument(
        "--trust-remote-code", action="store_true", help="run code that the target's repository brings"
    )

    text = parser.add_argument_group("text")
    source = text.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--chat", action="store_true", help="converse: /clear forgets, /exit or Ctrl-D leaves")
    text.add_argument("--system", metavar="TEXT", help="system message")
    text.add_argument("--no-chat-template", action="store_true", help="continue the prompt as raw text")
    text.add_argument(
        "--max-new-tokens", type=whole_number(1), default=256, metavar="N", help="(default: %(default)s)"
    )

    sampling = parser.add_argument_group("sampling", "Where not given, the target's generation config decides.")
    sampling.add_argument(
        "--temperature", type=real_number(0), default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    sampling.add_argument("--top-k", type=whole_number(0), metavar="K", help="0 is off")
    sampling.add_argument("--top-p", type=real_number(0, 1), metavar="P", help="1 is off")
    sampling.add_argument("--min-p", type=real_number(0, 1), metavar="P", help="0 is off")
    sampling.add_argument("--seed", type=whole_number(0), metavar="N")

    drafting = parser.add_argument_group("drafting")
    drafting.add_argument(
        "--num-assistant-tokens", type=whole_number(1), metavar="N", help="draft tokens per round, at most block_size"
    )
    drafting.add_argument(
        "--num-denoising-steps", type=whole_number(1), metavar="N", help="forwards that a draft is spread over"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="generate without the drafter as well and compare")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _refuse_conflicts(args)
    prompt = None if args.chat else _read_prompt(args.prompt)
    import torch
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    answerer = _Answerer(args)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    if args.chat:
        return _chat(answerer, args)
    inputs = answerer.encode(_messages(args.system, prompt), prompt)
    if args.compare:
        answerer.warm_up(inputs)
    answer = answerer.answer(inputs, is_shown=not args.json)
    report = {
        "text": answer.text,
        "num_tokens": len(answer.ids),
        "tokens_per_second": answer.tokens_per_second,
        "stats": _stats_as_dict(answer.stats),
        "ids_equal": None,
    }
    if args.compare:
        report |= _compare(answerer, inputs, answer, is_greedy=args.temperature == 0)
    if args.json:
        import json

        print(json.dumps(report))
        return 0
    _say(_stats_line(answer))
    if args.compare:
        print(_comparison_text(report, answer, answerer))
    return 0


def _refuse_conflicts(args: argparse.Namespace):
    if args.chat:
        for name in ("compare", "json", "no_chat_template"):
            if getattr(args, name):
                raise UsageError(
                    f"--chat and {option(name)} exclude each other: give one prompt with --prompt instead"
                )
    if args.no_chat_template and args.system is not None:
        raise UsageError(
            f"--system {args.system!r} needs the chat template: leave --no-chat-template out, or put the text at the "
            "head of the prompt"
        )
    if args.temperature == 0:
        for name in _SAMPLING_OPTIONS:
            if getattr(args, name) is not None:
                raise UsageError(
                    f"{option(name)} {getattr(args, name)} does nothing at --temperature 0, which is greedy: give a "
                    "--temperature above 0, or leave it out"
                )


def _read_prompt(prompt: str | None) -> str:
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("there is no prompt: give --prompt TEXT, --chat, or text on standard input")
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise UsageError("the prompt is empty: give --prompt TEXT, --chat, or text on standard input")
    return prompt


def _messages(system: str | None, prompt: str | None = None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages if prompt is None else [*messages, {"role": "user", "content": prompt}]


@dataclass
class _Answer:
    text: str
    ids: "torch.LongTensor"  # noqa: F821 - imported where it is used; shape (length,), on the CPU
    seconds: float
    stats: object | None  # GenerationStats, None without a drafter

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds


class _Answerer:
    """Loads the models that the arguments name, and generates as they say."""

    def __init__(self, args: argparse.Namespace):
        from .loading import load

        loaded = load(
            args.target, args.drafter, args.dtype, args.device, args.attn_implementation, args.trust_remote_code
        )
        self.target, self.tokenizer, self.drafter = loaded.target, loaded.tokenizer, loaded.drafter
        self._uses_template = not args.no_chat_template
        if self._uses_template and self.tokenizer.chat_template is None:
            raise UsageError(
                f"the tokenizer of --target {args.target!r} has no chat template: give --no-chat-template to continue "
                "the prompt as raw text"
            )
        if loaded.is_untrained:
            _say("No --drafter: the target's own layers draft, untrained (about 2 tokens per round, no speed-up).")
        self._config = self._generation_config(args)

    def _generation_config(self, args: argparse.Namespace):
        from transformers import GenerationConfig

        own, tokenizer = self.target.generation_config, self.tokenizer
        config = GenerationConfig(max_new_tokens=args.max_new_tokens, do_sample=args.temperature > 0)
        if own.pad_token_id is None:
            # transformers would take the first EOS as well, and warn at every call.
            eos = own.eos_token_id[0] if isinstance(own.eos_token_id, list) else own.eos_token_id
            config.pad_token_id = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # What is left unset is filled in by transformers, with its own top_k of 50 for one. In greedy mode these
        # values count as unset; the target's own would be warned of.
        config.temperature, config.top_k, config.top_p = args.temperature or 1.0, 50, 1.0
        if config.do_sample:
            config.top_k = _first_given(args.top_k, own.top_k, 0)
            config.top_p = _first_given(args.top_p, own.top_p, 1.0)
            config.min_p = _first_given(args.min_p, own.min_p, None)
        for name in ("num_assistant_tokens", "num_denoising_steps"):
            value = getattr(args, name)
            if value is not None:
                # In the call it outranks the target's config; only in the drafter's does a value count that
                # transformers fills in by itself.
                setattr(config, name, value)
                setattr(self.drafter.generation_config, name, value)
        return config

    def encode(self, messages: list[dict[str, str]], prompt: str | None = None) -> dict:
        """Input ids and attention mask, each of shape `(1, prompt_length)`; without a template, of `prompt` alone."""
        if self._uses_template:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = self.tokenizer(prompt, return_tensors="pt")
        return {name: encoded[name].to(self.target.device) for name in ("input_ids", "attention_mask")}

    def warm_up(self, inputs: dict):
        import copy

        import torch

        config = copy.deepcopy(self._config)
        config.max_new_tokens = min(_WARM_UP_TOKENS, config.max_new_tokens)
        with torch.random.fork_rng():  # the seed gives the same answer with and without a warm-up
            for drafter in (self.drafter, None):
                self._generate(inputs, config, drafter, streamer=None)

    def answer(self, inputs: dict, is_shown: bool = True, is_drafted: bool = True, streamer=None) -> _Answer:
        import time

        drafter = self.drafter if is_drafted else None
        streamer = streamer or make_streamer(self.tokenizer, is_shown)
        start = time.perf_counter()
        ids = self._generate(inputs, self._config, drafter, streamer)
        seconds = time.perf_counter() - start
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return _Answer(text, ids, seconds, drafter.last_generation_stats if is_drafted else None)

    def _generate(self, inputs: dict, config, drafter, streamer) -> "torch.LongTensor":  # noqa: F821
        try:
            output = self.target.generate(
                **inputs, generation_config=config, assistant_model=drafter, streamer=streamer
            )
        except ValueError as error:
            raise UsageError(f"these models and options cannot generate: {one_line(error)}") from error
        return output[0, inputs["input_ids"].shape[1] :].cpu()


def _first_given(*values):
    return next((value for value in values if value is not None), None)


def make_streamer(tokenizer, is_shown: bool):
    """A streamer that prints, or does all the same work in silence, and keeps the text."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False):
            self.text += text
            if is_shown:
                super().on_finalized_text(text, stream_end)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _chat(answerer: _Answerer, args: argparse.Namespace) -> int:
    try:
        import readline  # noqa: F401 - input() then edits lines and remembers them
    except ImportError:
        pass
    _say("/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
    messages = _messages(args.system)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if text == "/exit":
            return 0
        if text == "/clear":
            messages = _messages(args.system)
        elif text:
            messages += _messages(None, text)
            streamer = make_streamer(answerer.tokenizer, is_shown=True)
            try:
                answer = answerer.answer(answerer.encode(messages), streamer=streamer)
                _say(_stats_line(answer))
            except KeyboardInterrupt:
                streamer.end()
            messages.append({"role": "assistant", "content": streamer.text})


def _compare(answerer: _Answerer, inputs: dict, drafted: _Answer, is_greedy: bool) -> dict:
    from ..bench.comparison import first_difference

    plain = answerer.answer(inputs, is_shown=False, is_drafted=False)
    difference = None
    if is_greedy:
        difference = first_difference(answerer.target, inputs["input_ids"], plain.ids, drafted.ids)
    return {
        "ids_equal": difference is None if is_greedy else None,
        "first_difference": None if difference is None else asdict(difference),
        "plain_text": plain.text,
        "plain_num_tokens": len(plain.ids),
        "plain_tokens_per_second": plain.tokens_per_second,
        "speedup": drafted.tokens_per_second / plain.tokens_per_second,
    }


def _comparison_text(report: dict, answer: _Answer, answerer: _Answerer) -> str:
    speeds = (
        f"With drafter {report['tokens_per_second']:.1f} tokens/s, without {report['plain_tokens_per_second']:.1f}: "
        f"speedup {report['speedup']:.2f}."
    )
    if report["ids_equal"] is None:
        return f"{speeds}\nThe answers were sampled, from the same law: they need not be equal."
    if report["ids_equal"]:
        return f"{speeds}\nThe ids are equal, all {report['num_tokens']}."
    difference = report["first_difference"]

    def token(token_id):
        return "the end" if token_id is None else f"{answerer.tokenizer.decode([token_id])!r} ({token_id})"

    line = (
        f"The ids differ from new token {difference['index'] + 1} on: {token(difference['plain_id'])} without "
        f"drafter, {token(difference['drafted_id'])} with it"
    )
    if difference["logit_gap"] is not None:
        dtype = str(answerer.target.dtype).removeprefix("torch.")
        line += (
            f"; their logits differ by {difference['logit_gap']:.3g} there, where neighbouring {dtype} numbers lie "
            f"{difference['rounding']:.3g} apart"
        )
    return f"{speeds}\n{line}."


def _stats_as_dict(stats) -> dict | None:
    if stats is None:
        return None
    derived = {"acceptance_length": stats.acceptance_length, "tokens_per_round": stats.tokens_per_round}
    return {**asdict(stats), "num_accepted": dict(sorted(stats.num_accepted.items())), **derived}


def _stats_line(answer: _Answer) -> str:
    line = f"[{len(answer.ids)} tokens, {answer.tokens_per_second:.1f} tokens/s"
    stats = answer.stats
    if stats is None or not stats.num_rounds:
        return f"{line}, without drafts]"
    histogram = ", ".join(f"{accepted}: {rounds}" for accepted, rounds in sorted(stats.num_accepted.items()))
    return f"{line}, {stats.tokens_per_round:.2f} tokens per round; rounds by accepted tokens {histogram}]"


def _say(line: str):
    """About the run, not its result: on stderr, so that stdout can be piped."""
    print(line, file=sys.stderr, flush=True)


__all__ = ["add_command", "run"]
