"""
What a round takes as the text grows: the target's verification of 9 tokens and the drafter's synchronous draft, eager
and compiled in turn, from 256 to some 8,000 tokens of context.

The line of `fit` is least squares over the contexts: milliseconds without any context, and per 1,000 tokens of it. Its
slope times the bytes of a token's keys and values is the bandwidth that attention reaches.

    python benchmarks/context_growth.py --drafter hub_cards/d3d-smollm2-135m --output context-growth.json
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import DynamicCache

import d3d_hf
from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.drafting_session import DraftingSession
from d3d_hf.model.storage import GrowingCache
from d3d_hf.training.provenance import provenance


SIDES = ("eager", "compiled")
PIECE = 512


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8000])
    parser.add_argument("--repeats", type=int, default=12, help="at each context (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=4, help="of each round (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    targets = {side: embedded.load_target()[0] for side in SIDES}
    drafter = D3DDrafterForCausalLM.from_pretrained(args.drafter, dtype=targets["eager"].dtype)
    d3d_hf.compile_target(targets["compiled"], max_context=max(args.contexts))
    drafter.warmup(max_context=max(args.contexts) + 100)
    text = torch.randint(100, 40000, (max(args.contexts) + 1024,), generator=torch.Generator().manual_seed(0))
    rounds = {f"verify_{side}": Verification(targets[side], side) for side in SIDES}
    rounds |= {f"draft_{side}": Drafting(drafter, side) for side in SIDES}
    rows = []
    for context in sorted(args.contexts):
        rows.append(measure(rounds, text, context, args))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    report = {"results": rows, "fit": {name: fit(rows, name) for name in rounds}}
    report["kv_bytes_per_token"] = {
        "target": kv_bytes(targets["eager"].config, targets["eager"].dtype),
        "drafter": kv_bytes(drafter.config.backbone_config, drafter.dtype),
    }
    print(json.dumps(report["fit"]))
    if args.output is not None:
        args.output.write_text(json.dumps({**report, **provenance(sys.argv)}, indent=1))


class Verification:
    """The target's forward over a draft and the token before it."""

    def __init__(self, target, side: str):
        self._target, self._argument = target, cache_argument(target)
        num_layers = target.config.num_hidden_layers
        self._cache = DynamicCache() if side == "eager" else GrowingCache(num_layers)

    @torch.no_grad()
    def grow(self, text: torch.LongTensor):
        """Feeds what the cache lacks of a text."""
        while (start := self._cache.get_seq_length()) < text.shape[0]:
            self._feed(text[start : start + PIECE], logits_to_keep=1)

    def step(self, text: torch.LongTensor):
        """One round: the last token of the text and 8 drafted ones."""
        self.grow(text[:-1])
        self._feed(torch.cat([text[-1:], torch.full((8,), 100)]))
        self._cache.crop(text.shape[0] - 1 - self._cache.get_seq_length())

    @torch.no_grad()
    def _feed(self, tokens: torch.LongTensor, **kwargs):
        self._target(input_ids=tokens[None], use_cache=True, **{self._argument: self._cache}, **kwargs)


class Drafting:
    """A session that drafts 8 tokens after each text."""

    def __init__(self, drafter, side: str):
        self._session = DraftingSession(drafter, drafter.config.vocab_size, compile_drafter=side == "compiled")

    def grow(self, text: torch.LongTensor):
        self._session.draft(text, 8)

    def step(self, text: torch.LongTensor):
        self._session.prepare()
        self._session.draft(text, 8)


def measure(rounds: dict, text: torch.LongTensor, context: int, args) -> dict:
    """Median milliseconds of each kind of round, in turn; each feeds `new_tokens` more than the one before."""
    times = {name: [] for name in rounds}
    for one in rounds.values():
        one.grow(text[:context])
    for repeat in range(args.repeats + 2):
        part = text[: context + args.new_tokens * (repeat + 1)]
        for name, one in rounds.items():
            if name.startswith("verify"):
                one.grow(part[:-1])  # it fed these tokens in the round before
            start = time.perf_counter()
            one.step(part)
            if repeat >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    row = {"context": context}
    for name, values in times.items():
        row[f"{name}_ms"] = round(statistics.median(values), 1)
        row[f"{name}_quartiles_ms"] = [round(value, 1) for value in statistics.quantiles(values, n=4)[::2]]
    return row


def fit(rows: list[dict], name: str) -> dict[str, float]:
    line = statistics.linear_regression([row["context"] / 1000 for row in rows], [row[f"{name}_ms"] for row in rows])
    return {"ms_without_context": round(line.intercept, 1), "ms_per_1000_tokens": round(line.slope, 2)}


def kv_bytes(config, dtype: torch.dtype) -> int:
    """Of the keys and values of one token in all layers."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * dtype.itemsize


if __name__ == "__main__":
    main()
