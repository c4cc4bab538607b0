"""
What asynchronous drafting gives on this device, with nothing to download: models of known shapes with random weights,
and drafts whose acceptance is imposed.

    python examples/device_check.py --minutes 6 --out results    # one GPU
    python examples/device_check.py --tiny --out results         # a CPU will do: only shows that it runs

(a) The kernels: error against their twins in float64, and time over the floor that bytes and products imply.
(b) A packed pass: eager, compiled, as a CUDA graph.
(c) The target's forward and the packed pass, alone and at once: how much of the shorter one is hidden.
(d) `generate`: plain, with drafts after each verdict, and asynchronously, at several tokens per round.
(e) The peak of memory of each part.

Each row is printed and stored in OUT/device_check.json when it is there. A row for which no time is left is listed as
skipped, one that fails as failed; the exit code is 1 if any failed.
"""

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import DynamicCache, GenerationConfig

from d3d_hf import D3DDrafterForCausalLM, compile_target, uncompile_target
from d3d_hf.bench.recording import peak_memory_bytes, record, reset_peak_memory
from d3d_hf.bench.synthetic import ImposedAcceptance
from d3d_hf.compiled.drafter import compiled_drafter
from d3d_hf.compiled.graph_backend import graphs_for
from d3d_hf.cost_model.acceptance import constant_profile, survival
from d3d_hf.cost_model.shapes import random_model, shape_config
from d3d_hf.decoding.worker import ThreadWorker
from d3d_hf.kernels import (
    choose_tokens,
    choose_tokens_twin,
    dense_visibility,
    packed_attention,
    packed_attention_twin,
    visibility_of,
)
from d3d_hf.kernels.floors import H200_BYTES_PER_S, H200_FLOPS_PER_S, attention_cost, choice_cost, pass_cost
from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.packing import PackedLayout, lay_out, lay_out_tree
from d3d_hf.training.provenance import provenance


BLOCK_SIZE = 8
TREE_SIZE = 64
PREFILL_PIECE = 1024
# More than a last-level cache holds, so that each call of a kernel reads its keys from memory.
CACHE_BYTES = 256 * 2**20


class Report:
    """The rows so far, on the disk too."""

    def __init__(self, folder: Path, settings: dict, minutes: float):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "device_check.json"
        self._end = time.monotonic() + 60 * minutes
        argv = ["python", "examples/device_check.py", *sys.argv[1:]]
        self.content = {
            **provenance(argv),
            "settings": settings,
            "parts": {},
            "skipped": [],
            "failed": [],
            "is_complete": False,
        }

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def attempt(self, part: str, name: str, seconds: float, make: Callable[[], dict]):
        """One row, if about so many seconds are left for it. Returns what was made, or `None`."""
        if self.seconds_left < seconds:
            self.content["skipped"].append({"part": part, "row": name})
            return self.save()
        try:
            row = make()
        except Exception as error:
            message = (str(error).strip().splitlines() or [""])[0]
            self.content["failed"].append({"part": part, "row": name, "error": f"{type(error).__name__}: {message}"})
            print(f"{part}: {name}: FAILED: {type(error).__name__}: {message}", flush=True)
            return self.save()
        self.content["parts"].setdefault(part, []).append({"row": name, **row})
        print(f"{part}: {name}: " + ", ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        self.save()
        return row

    def save(self):
        self._path.write_text(json.dumps(self.content, indent=1))

    def finish(self) -> int:
        self.content["is_complete"] = not self.content["skipped"] and not self.content["failed"]
        self.save()
        print(f"{len(self.content['skipped'])} rows skipped, {len(self.content['failed'])} failed: {self._path}")
        return 1 if self.content["failed"] else 0


def _short(value):
    return f"{value:.4g}" if isinstance(value, float) else value


class Check:
    """
    Args:
        report ([`Report`]): Where rows go.
        device (`torch.device`): Where everything runs.
        is_tiny (`bool`): Tiny variants of the shapes.
    """

    def __init__(self, report: Report, device: torch.device, is_tiny: bool):
        self.report, self.device, self.is_tiny = report, device, is_tiny
        self.graphs = graphs_for(device)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.contexts = (64, 128) if is_tiny else (512, 8192)
        self.num_new_tokens = 24 if is_tiny else 96
        self.seconds = 0.1 if is_tiny else 1.0  # of measuring, for one time
        self.attention = "sdpa"

    # (a)

    def kernels(self):
        shape = shape_config("qwen3-8b", tiny=self.is_tiny)
        heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        errors = []
        for context in self.contexts:
            layouts = {f"{number} guesses": self._packed_layout(number, context) for number in (0, 3)}
            nodes = torch.arange(1, TREE_SIZE + 1)
            layouts[f"a tree of {TREE_SIZE}"] = lay_out_tree(1, nodes // 2, context)  # two children each
            for kind, layout in layouts.items():
                name = f"attention, {context} cached, {kind}"
                make = functools.partial(self._attention, heads, kv_heads, dim, layout)
                row = self.report.attempt("kernels", name, 10, make)
                errors.append(float("inf") if row is None else row["relative_error"])
        for num_rows in (BLOCK_SIZE, self._packed_layout(0, 64).num_tokens):
            name = f"choice, {num_rows} rows"
            self.report.attempt("kernels", name, 5, functools.partial(self._choice, num_rows, shape.vocab_size))
        if self.graphs is not None and max(errors) < 0.02:  # what is compiled for a CPU is not made for it
            self.attention = "d3d_packed"
        self.report.content["settings"]["attention"] = self.attention
        self._end_part("kernels")

    def _attention(self, heads: int, kv_heads: int, dim: int, layout: PackedLayout) -> dict:
        num_tokens, context = layout.num_tokens, layout.num_cached
        size = torch.empty((), dtype=self.dtype).element_size()
        cost = attention_cost(heads, kv_heads, dim, num_tokens, context, size)
        visibility = visibility_of(layout).to(self.device)
        query = self._random(1, heads, num_tokens, dim)
        num_storages = 1 if self.is_tiny else -(-CACHE_BYTES // cost.num_bytes)
        shape = (1, kv_heads, context + num_tokens, dim)
        storages = [(self._random(*shape), self._random(*shape)) for _ in range(num_storages)]
        key, value = storages[0]
        expected = packed_attention_twin(query.double(), key.double(), value.double(), visibility)
        ours = packed_attention(query, key, value, visibility)
        mask = dense_visibility(visibility, key.shape[2])
        group = heads // kv_heads

        def dense():
            for key, value in storages:
                keys, values = (
                    states[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for states in (key, value)
                )
                torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            return query

        def packed():
            for key, value in storages:
                output = packed_attention(query, key, value, visibility)
            return output

        row = {"relative_error": _relative(ours, expected), "floor_ms": cost.floor_ms()}
        row |= self._kernel_times("kernel", packed, num_storages)
        row |= self._kernel_times("sdpa_mask", dense, num_storages)
        return {**row, "times_floor": row["kernel_ms"] / row["floor_ms"]}

    def _choice(self, num_rows: int, vocab_size: int) -> dict:
        cost = choice_cost(num_rows, vocab_size, torch.empty((), dtype=self.dtype).element_size())
        num_copies = 1 if self.is_tiny else -(-CACHE_BYTES // cost.num_bytes)
        copies = [self._random(num_rows, vocab_size) for _ in range(num_copies)]
        ours, expected = choose_tokens(copies[0]), choose_tokens_twin(copies[0].double())

        def choose():
            for logits in copies:
                chosen = choose_tokens(logits)
            return chosen.tokens

        def argmax():
            for logits in copies:
                tokens = logits.argmax(-1)
            return tokens

        row = {
            "same_tokens": bool((ours.tokens == expected.tokens).all()),
            "largest_error_of_log_normalizer": float((ours.log_normalizers - expected.log_normalizers).abs().max()),
            "floor_ms": cost.floor_ms(),
        }
        row |= self._kernel_times("kernel", choose, num_copies)
        row |= self._kernel_times("argmax_alone", argmax, num_copies)
        return {**row, "times_floor": row["kernel_ms"] / row["floor_ms"]}

    def _kernel_times(self, name: str, function: Callable[[], torch.Tensor], num_calls: int) -> dict:
        """Of one call of the several that a function makes, without what launching costs where it can be replayed."""
        if self.graphs is not None:
            function = self.graphs.capture(function, [], self.graphs.new_workspace())
        return self._times(name, function, num_calls)

    # (b)

    def packed_passes(self, drafter, name: str):
        for context in self.contexts:
            for num_guesses in (0,) if self.is_tiny else (0, 3):
                row = f"{name}, {context} cached, {num_guesses} guesses"
                make = functools.partial(self._packed_times, drafter, context, num_guesses)
                self.report.attempt("packed pass", row, 15, make)
        self._end_part("packed pass")

    def _packed_times(self, drafter, context: int, num_guesses: int) -> dict:
        layout = self._packed_layout(num_guesses, context)
        config, num_tokens = drafter.config.backbone_config, layout.num_tokens
        row = {"num_tokens": num_tokens, "floor_ms": pass_cost(config, num_tokens, context, 0).floor_ms()}
        fast = "graphed" if self.graphs is not None else "compiled"
        row |= self._times("eager", self._packed_pass(drafter, context, num_guesses, False))
        row |= self._times(fast, self._packed_pass(drafter, context, num_guesses, True))
        return {**row, "times_floor": row[f"{fast}_ms"] / row["floor_ms"]}

    def compiled_layers(self, drafter, name: str):
        """What torch.compile makes of one layer; compiling all of them would take the time of all the rest."""
        if not self.is_tiny:
            context = self.contexts[0]
            make = functools.partial(self._layers, drafter, context)
            self.report.attempt("packed pass", f"{name}, {context} cached, one layer compiled", 60, make)

    def _layers(self, drafter, context: int) -> dict:
        config, layout = drafter.config.backbone_config, self._packed_layout(0, context).to(self.device)
        backbone = drafter._backbone
        layer, hidden = backbone.model.layers[0], self._random(1, layout.num_tokens, config.hidden_size)
        rope = backbone.model.rotary_emb(hidden, layout.position_ids)
        mask = dense_visibility(visibility_of(layout), context + layout.num_tokens)[..., context:].contiguous()

        def run(function):
            return lambda: function(hidden, attention_mask=mask, position_embeddings=rope)

        before = backbone.config._attn_implementation
        backbone.set_attn_implementation("sdpa")
        try:
            with torch.no_grad():
                row = self._times("eager_layer", run(layer))
                row |= self._times("compiled_layer", run(torch.compile(layer, dynamic=False)))
        finally:
            backbone.set_attn_implementation(before)
        return {"num_layers": config.num_hidden_layers, "is_without_cache": True, **row}

    def _packed_layout(self, num_guesses: int, context: int):
        """A draft of a whole block under verification, and the branches of all verdicts, on the CPU."""
        num_verdicts = BLOCK_SIZE + 1
        anchors = [context + verdict for verdict in range(num_verdicts) for _ in range(1 + num_guesses)]
        shown = [int(branch > 0) for _ in range(num_verdicts) for branch in range(1 + num_guesses)]
        return lay_out(
            num_verdicts,
            torch.tensor([anchors]),
            (BLOCK_SIZE,) * len(anchors),
            num_visible=torch.tensor([shown]),
            num_cached=context,
        )

    @torch.no_grad()
    def _packed_pass(self, drafter, context: int, num_guesses: int, is_fast: bool) -> Callable[[], torch.Tensor]:
        """A function that runs a packed pass after a context that is cached."""
        passes = compiled_drafter(drafter)
        passes.refresh(drafter._backbone)
        cache = passes.make_cache(True) if is_fast else DynamicCache()
        layout = self._packed_layout(num_guesses, context)
        ids = torch.zeros(1, layout.num_tokens, dtype=torch.long)
        for start in range(0, context, PREFILL_PIECE):
            length = min(PREFILL_PIECE, context - start)
            piece = lay_out(length, num_cached=start, device=self.device)
            prompt = torch.zeros(1, length, dtype=torch.long, device=self.device)
            drafter.packed_forward(prompt, piece, cache=cache, logits_to_keep=1)
        if is_fast and self.graphs is None:  # on a CPU each size takes seconds to compile: this one alone
            passes.make_ready(drafter, [passes.size_of(cache, layout.num_tokens)])
        elif is_fast:
            cache.prepare(drafter, layout.num_tokens)
        else:
            ids, layout = ids.to(self.device), layout.to(self.device)

        def run():
            outputs = drafter.packed_forward(ids, layout, cache=cache, logits_to_keep=None)
            cache.crop(-layout.num_tokens)
            return outputs.hidden_states[0]

        num_before = passes.num_static_passes
        run()
        if is_fast and passes.num_static_passes == num_before:
            raise RuntimeError(f"the pass ran eagerly: {passes.reason}")
        return run

    # (c)

    def overlaps(self, target, drafter, name: str, guesses: tuple[int, ...]):
        for context in self.contexts:
            for num_guesses in guesses:
                row = f"{name}, {context} cached, {num_guesses} guesses"
                make = functools.partial(self._overlap, target, drafter, name, context, num_guesses)
                self.report.attempt("overlap", row, 25, make)
        self._end_part("overlap")

    def _overlap(self, target, drafter, name: str, context: int, num_guesses: int) -> dict:
        num_tokens = self._packed_layout(num_guesses, context).num_tokens
        costs = [
            pass_cost(target.config, BLOCK_SIZE + 1, context, BLOCK_SIZE + 1),
            pass_cost(drafter.config.backbone_config, num_tokens, context, 0),
        ]
        row = {"num_packed_tokens": num_tokens, "shared_device_floor_ms": (costs[0] + costs[1]).floor_ms()}
        kinds = (False, True) if self.graphs is not None else (False,)
        verify = {is_fast: self._verification(target, context, is_fast) for is_fast in kinds}
        draft = {is_fast: self._packed_pass(drafter, context, num_guesses, is_fast) for is_fast in kinds}
        names = {False: "eager", True: "graphed"}
        for is_fast in kinds:
            row |= self._times(f"verify_{names[is_fast]}", verify[is_fast])
            row |= self._times(f"draft_{names[is_fast]}", draft[is_fast])
        for fast_target, fast_draft in ((False, False), (False, True), (True, True)):
            if fast_target not in kinds or fast_draft not in kinds:
                continue
            alone = [row[f"verify_{names[fast_target]}_ms"], row[f"draft_{names[fast_draft]}_ms"]]
            times = self._both_times(verify[fast_target], draft[fast_draft])
            both, limit = times["both_ms"], max(*alone, row["shared_device_floor_ms"])
            row[f"{names[fast_target]} target, {names[fast_draft]} draft"] = {
                **times,
                "hidden_share": (sum(alone) - both) / min(alone),
                "limit_ms": limit,
                "times_limit": both / limit,
            }
            if fast_draft == kinds[-1] and num_guesses == 0:
                self._limits[name, context, fast_target] = limit
        return row

    @torch.no_grad()
    def _verification(self, target, context: int, is_fast: bool) -> Callable[[], torch.Tensor]:
        """A function that runs a compiled target's forward, or its plain one, over a draft and its anchor."""
        key, cache = cache_argument(target), DynamicCache()
        plain_forward = getattr(type(target), "_plain_class", type(target)).forward
        if is_fast:
            state = target.__dict__["_compiled_target"]
            state.refresh(target)
            cache = state.make_cache(context + 4 * BLOCK_SIZE)
        for start in range(0, context, PREFILL_PIECE):
            prompt = torch.zeros(1, min(PREFILL_PIECE, context - start), dtype=torch.long, device=self.device)
            plain_forward(target, input_ids=prompt, use_cache=True, logits_to_keep=1, **{key: cache})
        ids = torch.zeros(1, BLOCK_SIZE + 1, dtype=torch.long, device=self.device)

        def run():
            if is_fast:
                outputs = state.forward(target, {"input_ids": ids, "use_cache": True, key: cache})
            else:
                outputs = plain_forward(target, input_ids=ids, use_cache=True, **{key: cache})
            if outputs is None:
                raise RuntimeError(f"the target ran eagerly: {state.reason}")
            cache.crop(-ids.shape[1])
            return outputs.logits

        run()
        return run

    def _both_times(self, verify: Callable, draft: Callable) -> dict:
        """Until both are done, the draft in a worker's thread and on its stream."""
        worker = ThreadWorker(self.device)

        def both():
            pending = worker.submit(lambda: SimpleNamespace(hidden_states=draft()))
            verify()
            worker.take(pending, timeout_s=60)

        try:
            return self._times("both", both)
        finally:
            worker.stop()

    # (d)

    def generations(self, target, drafter, name: str, is_fast_target: bool, profiles: tuple[float, ...]):
        kind = "graphed" if is_fast_target else "eager"
        for tokens_per_round in profiles:
            for context in self.contexts:
                for method in ("plain", "sync", "async"):
                    if method == "plain" and (context, is_fast_target) in self._plain:
                        continue
                    row = f"{name}, {kind} target, {context} of context, {method}"
                    row += "" if method == "plain" else f" at {tokens_per_round:g} tokens per round"
                    make = functools.partial(
                        self._generation, target, drafter, name, context, method, tokens_per_round, is_fast_target
                    )
                    self.report.attempt("generate", row, 1 if self.is_tiny else 6, make)
        self._end_part("generate")

    def _generation(self, target, drafter, name, context, method, tokens_per_round, is_fast_target) -> dict:
        vocab_size = target.config.vocab_size
        profile = constant_profile(tokens_per_round, BLOCK_SIZE)
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(vocab_size, (context,), generator=generator).tolist()
        kwargs = {} if method == "plain" else {"assistant_model": drafter}
        options = drafter.generation_config
        options.drafting_mode = "sync" if method == "plain" else method
        options.num_bonus_guesses = options.draft_tree_size = 0
        options.compile_drafter, options.on_draft_error = self.graphs is not None, "raise"
        length = context + self.num_new_tokens + 2 * BLOCK_SIZE
        with imposed(EvenAcceptance(profile, vocab_size, max_length=length), target, drafter):
            for num_new_tokens in (3 * BLOCK_SIZE, self.num_new_tokens):  # the first warms up
                config = GenerationConfig(
                    max_new_tokens=num_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
                )
                run = record(target, prompt, config, **kwargs)
        num_tokens, seconds = len(run.ids) - run.rounds[0][1], run.seconds - run.first_token_seconds
        num_rounds = len(run.rounds) - 1
        row = {
            "tokens_per_second": num_tokens / seconds,
            "tokens_per_round": num_tokens / num_rounds,
            "round_ms": 1e3 * seconds / num_rounds,
            "first_token_ms": 1e3 * run.first_token_seconds,
            "peak_bytes": run.peak_memory_bytes,
        }
        if method == "plain":
            self._plain[context, is_fast_target] = row["tokens_per_second"]
            return row
        row["mode"] = drafter.last_generation_stats.mode
        plain, limit = self._plain.get((context, is_fast_target)), self._limits.get((name, context, is_fast_target))
        if plain is not None:
            row["speedup"] = row["tokens_per_second"] / plain
        if method == "async" and limit is not None:
            row |= {"limit_ms": limit, "times_limit": row["round_ms"] / limit}
        return row

    # all

    def run_all(self):
        self.kernels()
        first = ("qwen3-8b", None)
        drafters = [first] if self.is_tiny else [first, ("qwen3-1.7b", None), ("qwen3-8b", 31)]
        profiles = (5,) if self.is_tiny else (5, 4, 6, 7)
        self._target("qwen3-8b", drafters, profiles)
        if not self.is_tiny and self.report.seconds_left > 75:
            self.contexts = self.contexts[:1]
            self._target("qwen3-32b", [("qwen3-8b", 31)], (5,))

    def _target(self, target_name: str, drafters: list, profiles: tuple[float, ...]):
        config = self._config(target_name)
        make = functools.partial(random_model, config, self.dtype, self.device, attn_implementation=self.attention)
        target = self._built(make, target_name)
        self._plain, self._limits = {}, {}
        for shape, num_layers in drafters if target is not None else []:
            name = shape if num_layers is None else f"{shape} of {num_layers} layers"
            drafter = self._built(functools.partial(self._drafter, shape, num_layers), name)
            if drafter is None:
                continue
            is_first, name = (shape, num_layers) == drafters[0], f"{name} for {target_name}"
            if is_first:
                self.packed_passes(drafter, name)
            kinds = (True, False) if self.graphs is not None else (False,)
            if kinds[0]:
                compile_target(target, draft_lengths=(BLOCK_SIZE,))
            self.overlaps(target, drafter, name, (0, 3) if is_first and not self.is_tiny else (0,))
            for is_fast_target in kinds:
                if not is_fast_target:
                    uncompile_target(target)
                self.generations(target, drafter, name, is_fast_target, profiles)
            if is_first and target_name == "qwen3-8b":
                self.compiled_layers(drafter, name)
            del drafter
            self._free()
        del target
        self._free()

    def _config(self, shape: str, num_layers: int | None = None):
        return shape_config(shape, None if self.is_tiny else num_layers, tiny=self.is_tiny)

    def _drafter(self, shape: str, num_layers: int | None) -> D3DDrafterForCausalLM:
        config = self._config(shape, num_layers)
        backbone = random_model(config, self.dtype, self.device, seed=1, attn_implementation=self.attention)
        with self.device:
            return D3DDrafterForCausalLM.from_backbone(backbone, block_size=BLOCK_SIZE).eval()

    def _built(self, make: Callable, name: str):
        models = []

        def build() -> dict:
            reset_peak_memory(self.device)
            start = time.perf_counter()
            models.append(make())
            return {"seconds": time.perf_counter() - start, "peak_bytes": peak_memory_bytes(self.device)}

        self.report.attempt("models", name, 1 if self.is_tiny else 20, build)
        return models[0] if models else None

    def _free(self):
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def _wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def _times(self, name: str, function: Callable, num_calls: int = 1) -> dict:
        """Median, and the tenth and ninetieth of a hundred, of one of the calls that a function makes."""
        for _ in range(2):
            function()
        self._wait()
        times, end = [], time.perf_counter() + self.seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            function()
            self._wait()
            times.append(1e3 * (time.perf_counter() - start) / num_calls)
        times.sort()
        low, high = times[len(times) // 10], times[len(times) * 9 // 10]
        return {f"{name}_ms": times[len(times) // 2], f"{name}_ms_p10_p90": [low, high]}

    def _end_part(self, part: str):
        """(e) What memory the part took at most."""
        memory = self.report.content.setdefault("peak_bytes", {})
        memory[part] = max(memory.get(part, 0), peak_memory_bytes(self.device) or 0)
        reset_peak_memory(self.device)
        self.report.save()


class EvenAcceptance(ImposedAcceptance):
    """
    Imposes a profile on few rounds as if they were many: verdicts come as often as they are likely, in a fixed order,
    for the draws are spread evenly over the unit interval (van der Corput's sequence) and not at random.
    """

    _num_rounds = 0

    def draft(self, context_length: int, num_tokens: int) -> torch.LongTensor:
        self._num_rounds += 1
        draw = int(f"{self._num_rounds:016b}"[::-1], 2) / 2**16
        reached = torch.tensor(survival(self._profile[:num_tokens]))
        places = slice(context_length, context_length + num_tokens)
        return torch.where(reached > draw, self._text[places], self._wrong[places])


@contextmanager
def imposed(acceptance: ImposedAcceptance, target, drafter):
    """What the target chooses and which drafts are right, for a while."""
    acceptance.impose_on_target(target)
    acceptance.impose_on_drafter(drafter)
    try:
        yield
    finally:
        del target.forward, drafter.make_drafts


def _relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0, help="no row begins after (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder of device_check.json")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU too: only shows that it runs")
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes:g}: give more than 0.")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not args.tiny:
        parser.error("there is no CUDA device: give --tiny, which needs none, or run it where there is one.")
    settings = {
        "device": device.type,
        "is_tiny": args.tiny,
        "minutes": args.minutes,
        "block_size": BLOCK_SIZE,
        "floors": {"bytes_per_s": H200_BYTES_PER_S, "flops_per_s": H200_FLOPS_PER_S},
    }
    report = Report(args.out, settings, args.minutes)
    torch.manual_seed(0)
    Check(report, device, args.tiny).run_all()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
