"""Asynchronous drafting: packed passes against unpacked ones, generations against plain ones, faults, threads."""

import copy
import functools
import gc
import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_hf import D3DDrafterForCausalLM, D3DTrainer, D3DTrainingArguments
from d3d_hf.decoding import async_drafts
from d3d_hf.decoding.async_drafts import AsyncDrafts
from d3d_hf.decoding.packed_drafts import PackedSession, guesses_without
from d3d_hf.decoding.planner import Branch, BranchValues, plan_branches, verdict_chances
from d3d_hf.decoding.worker import InlineWorker, ThreadWorker
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import (
    ARCHITECTURES,
    ForwardCounter,
    acceptance_profile_drafter,
    memoryless_model,
    oracle_drafter,
    tiny_model,
)
from lossless import BLOCK_SIZE, call_of, drafters_of, generate, prompt_of
from test_sampling import LAWS, NUM_TESTS, VOCAB_SIZE, drafter_of, transition_p_value, transitions


def asynchronous(drafter, **options):
    drafter.generation_config.drafting_mode = "async"
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(AsyncDrafts, "_make_worker", lambda self, drafter: InlineWorker())


class Orders:
    """
    Decides, by events, what comes first in each round: the packed pass (`"draft"`), the target's forward (`"verify"`),
    or neither (`"free"`).

    Args:
        choose (`Callable`): Called for each round.
    """

    def __init__(self, target, monkeypatch, choose):
        self._orders, self._packed, self._verified = {}, {}, {}
        self._round = None  # the id of the one that is to be verified
        submit, pack, forward = AsyncDrafts._submit, PackedSession.pack, target.forward

        def submitting(drafts, *args):
            which = drafts._round_id + 1
            self._orders[which] = choose()
            self._packed[which], self._verified[which] = threading.Event(), threading.Event()
            submit(drafts, *args)
            self._round = None if drafts._pending is None else drafts._round_id

        def packing(session, *args, **kwargs):
            which = kwargs["round_id"]
            if self._orders[which] == "verify":
                assert self._verified[which].wait(20)
            try:
                return pack(session, *args, **kwargs)
            finally:
                self._packed[which].set()

        @functools.wraps(forward)
        def verifying(*args, **kwargs):
            which, self._round = self._round, None
            if which is not None and self._orders[which] == "draft":
                assert self._packed[which].wait(20)
            try:
                return forward(*args, **kwargs)
            finally:
                if which is not None:
                    self._verified[which].set()

        monkeypatch.setattr(AsyncDrafts, "_submit", submitting)
        monkeypatch.setattr(PackedSession, "pack", packing)
        target.forward = verifying


# The packed pass


@torch.no_grad()
def branch_logits_by_definition(drafter, text, anchor, guess):
    """The branch alone, after its own context, nothing cached."""
    size = drafter.config.block_size
    shown = [] if guess is None else [guess]
    layout = lay_out(anchor + 1, torch.tensor([[anchor]]), (size,), num_visible=torch.tensor([[len(shown)]]))
    ids = torch.tensor([text[: anchor + 1].tolist() + shown + [0] * (size - len(shown))])
    return drafter.packed_forward(ids, layout).logits[0, anchor + 1 :]


@pytest.mark.parametrize(
    "architecture, guess_source",
    [*((architecture, "autoregressive") for architecture in ARCHITECTURES), ("llama", "given"), ("gemma3", "none")],
)
def test_every_branch_equals_an_unpacked_forward(architecture, guess_source):
    model = tiny_model(architecture, seed=5, initializer_range=0.2)
    drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=4)

    @settings(max_examples=2, deadline=None)
    @given(st.integers(0, 2**31), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=20, max_size=20))
    def check(seed, history):
        """20 rounds of drafts of any length and verdicts of any kind; the cache keeps the accepted context alone."""
        generator = torch.Generator().manual_seed(seed)

        def tokens(count):
            return torch.randint(2, 67, (count,), generator=generator)

        session = PackedSession(drafter, 67)
        text = tokens(7)
        for round_id, (draft_length, num_accepted) in enumerate(history):
            num_accepted = min(num_accepted, draft_length)
            whole = torch.cat([text, tokens(draft_length)])
            given_guesses = [tokens(2).tolist() for _ in range(draft_length + 1)] if guess_source == "given" else None
            drafts = session.pack(
                whole, len(text), round_id, 0 if guess_source == "none" else 2, given_guesses=given_guesses
            )
            assert drafts.round_id == round_id and session.num_cached == len(whole)
            assert {branch.node for branch in drafts.branches if branch.guess is None} == set(range(draft_length + 1))
            for index, branch in enumerate(drafts.branches):
                if branch.guess is not None and branch.node < draft_length and given_guesses is None:
                    assert branch.guess != int(whole[len(text) + branch.node]), "the rejected token"
                anchor = len(text) - 1 + branch.node
                expected = branch_logits_by_definition(drafter, whole, anchor, branch.guess)
                logits = session.block_of(drafts, index, bonus=2).logits
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            text = torch.cat([whole[: len(text) + num_accepted], tokens(1)])

    check()


def test_plans_put_a_masked_branch_for_every_verdict_first():
    guesses = [[1, 2], [3], [4, 5]]
    plan = plan_branches(guesses)
    assert set(plan[:3]) == {Branch(2), Branch(1), Branch(0)}
    assert set(plan[3:]) == {Branch(0, 1), Branch(0, 2), Branch(1, 3), Branch(2, 4), Branch(2, 5)}


def test_with_a_budget_the_likeliest_verdicts_come_first_and_guesses_where_they_pay():
    guesses = [[1, 2], [3], [4, 5]]
    plan = plan_branches(guesses, max_branches=4, verdict_chances=[0.7, 0.02, 0.28])
    assert plan == [Branch(0), Branch(2), Branch(0, 1), Branch(2, 4)]
    assert plan_branches([[], [], []], max_branches=2, verdict_chances=[0.1, 0.5, 0.4]) == [Branch(1), Branch(2)]


def test_a_verdict_ends_where_the_text_leaves_the_tree():
    chances = verdict_chances([0.9, 0.5, 0.3, 0.1], [0, 1, 1, 3])
    assert chances == pytest.approx([0.1, 0.1, 0.5, 0.2, 0.1])
    assert verdict_chances([], []) == [1.0] and min(verdict_chances([0.9, 0.9], [0, 0])) > 0


def test_what_branches_are_worth_is_learned_from_verdicts():
    values = BranchValues()
    first = values.guess(0)
    for _ in range(60):
        values.record_guesses([5, 6], bonus=6)
        values.record_round("masked", 2)
        values.record_round("guessed", 5)
    assert values.guess(1) > first > values.guess(0) and values.masked == pytest.approx(2.0, abs=0.1)
    # What never helps comes last.
    plan = plan_branches([[1, 2], [3]], max_branches=3, verdict_chances=[0.6, 0.4], values=values)
    assert plan == [Branch(0, 2), Branch(0), Branch(1)]


def test_a_rejected_token_is_never_its_own_guess():
    candidates = torch.tensor([[7, 8, 9], [7, 8, 9], [7, 8, 9]])
    assert guesses_without(candidates, [7, 9], 2) == [[8, 9], [7, 8], [7, 8]]


def test_every_branch_on_a_tree_equals_an_unpacked_forward():
    """Rounds of random trees with random verdicts: each branch sees its own path alone, whatever stands beside it."""
    for architecture in ARCHITECTURES:
        drafter = D3DDrafterForCausalLM.from_backbone(
            tiny_model(architecture, seed=5, initializer_range=0.2), block_size=4
        )
        generator = torch.Generator().manual_seed(7)
        session, text = PackedSession(drafter, 67), torch.randint(2, 67, (7,), generator=generator)
        for round_id in range(8):
            num_nodes = int(torch.randint(2, 9, (), generator=generator))
            parents = [int(torch.randint(0, node + 1, (), generator=generator)) for node in range(num_nodes)]
            tokens = torch.randperm(60, generator=generator)[:num_nodes] + 2
            guesses = [[3] if node % 2 else [] for node in range(num_nodes + 1)]
            drafts = session.pack(
                torch.cat([text, tokens]), len(text), round_id, 1, given_guesses=guesses, parents=parents
            )
            paths = [[]]
            for node, parent in enumerate(parents):
                paths.append([*paths[parent], int(tokens[node])])
            assert {branch.node for branch in drafts.branches} == set(range(num_nodes + 1))
            for index, branch in enumerate(drafts.branches):
                alone = torch.cat([text, torch.tensor(paths[branch.node], dtype=torch.long)])
                expected = branch_logits_by_definition(drafter, alone, len(alone) - 1, branch.guess)
                logits = session.block_of(drafts, index, bonus=2).logits
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            accepted = paths[int(torch.randint(0, num_nodes + 1, (), generator=generator))]
            text = torch.cat([text, torch.tensor([*accepted, 61])])


# The worker


@pytest.mark.parametrize("make", [InlineWorker, lambda: ThreadWorker(torch.device("cpu"), 1)])
def test_workers_run_jobs_in_order_and_hand_over_exceptions(make):
    worker, order = make(), []
    futures = [worker.submit(lambda i=i: order.append(i) or i * i) for i in range(5)]
    assert [worker.take(future, 10).value for future in futures] == [0, 1, 4, 9, 16] and order == list(range(5))
    with pytest.raises(ZeroDivisionError):
        worker.take(worker.submit(lambda: 1 / 0), 10)
    assert worker.take(worker.submit(lambda: "still alive"), 10).value == "still alive"
    assert worker.stop() and worker.stop()


def test_the_thread_sets_its_own_state_and_ends():
    before, worker = threading.active_count(), ThreadWorker(torch.device("cpu"), 1)
    state = worker.take(worker.submit(lambda: (torch.is_grad_enabled(), torch.get_num_threads())), 10).value
    assert state == (False, 1) and torch.is_grad_enabled()
    assert worker.stop() and threading.active_count() == before


def test_stopping_drops_what_has_not_begun_and_waits_for_what_runs():
    worker, started, release = ThreadWorker(torch.device("cpu")), threading.Event(), threading.Event()
    running = worker.submit(lambda: started.set() or release.wait(10))
    waiting = worker.submit(lambda: 1 / 0)
    assert started.wait(10)
    assert worker.stop(timeout_s=0.01) is False, "it still runs"
    release.set()
    assert running.result(10).value is True and waiting.cancelled()


def test_a_dropped_worker_ends_its_thread():
    worker = ThreadWorker(torch.device("cpu"))
    worker.take(worker.submit(lambda: None), 10)
    thread = worker._thread
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# Generations


def assert_same_asynchronously(target, prompt, drafter, num_forwards=None, reference=None, **kwargs):
    reference = generate(target, prompt, **kwargs) if reference is None else reference
    with ForwardCounter(target) as forwards, ForwardCounter(drafter, "packed_forward") as passes:
        output = generate(target, prompt, asynchronous(drafter), **kwargs)
    assert output.tolist() == reference.tolist()
    stats = drafter.last_generation_stats
    assert stats.mode == "async" and stats.num_errors == 0
    assert stats.num_rounds == forwards.count
    assert stats.num_tokens == output.shape[1] - prompt.shape[1]
    assert sum((accepted + 1) * rounds for accepted, rounds in stats.num_accepted.items()) == stats.num_tokens
    assert sum(stats.num_hits.values()) <= stats.num_rounds - 1
    assert passes.count >= stats.num_rounds - 2, "the last two rounds may have nothing to draft for"
    if num_forwards is not None:
        assert forwards.count == num_forwards
    return stats


@pytest.mark.parametrize("num_guesses", [0, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_are_those_of_plain_generation(architecture, num_guesses):
    target, prompt = tiny_model(architecture, seed=11), prompt_of()
    reference = generate(target, prompt)
    for name, drafter in drafters_of(reference, architecture="gemma3").items():
        drafter.generation_config.num_bonus_guesses = num_guesses
        # the first round has no draft; then an oracle needs 32 / 6 rounds, an anti-oracle one per token
        num_forwards = {"oracle": 1 + 6, "anti": 33, "noisy": 1 + 11}.get(name)
        stats = assert_same_asynchronously(target, prompt, drafter, num_forwards, reference)
        assert stats.num_hits.get("none", 0) == 0, "a masked branch serves every verdict"
        if name == "oracle":
            assert stats.num_hits == ({"masked": 6} if num_guesses == 0 else {"guessed": 6})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": 7},
        {"eos": 9},
        {"eos": 4},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
    ],
)
def test_ends_and_processors(kwargs):
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    kwargs = dict(kwargs)
    free = generate(target, prompt)
    if "eos" in kwargs:
        kwargs |= {"eos_token_id": int(free[0, 6 + kwargs.pop("eos")]), "pad_token_id": 0}
    reference = generate(target, prompt, **kwargs)
    proposed = free if "eos_token_id" in kwargs else reference
    for drafter in drafters_of(proposed).values():
        assert_same_asynchronously(target, prompt, drafter, reference=reference, **kwargs)


@pytest.mark.parametrize(
    "options", [{"draft_slot_budget": 5}, {"draft_slot_budget": 20}, {"bonus_guess_source": "slots"}]
)
def test_budgets_and_guesses_from_the_slots(options):
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    reference = generate(target, prompt)
    for name, drafter in drafters_of(reference).items():
        for option, value in options.items():
            setattr(drafter.generation_config, option, value)
        stats = assert_same_asynchronously(target, prompt, drafter, reference=reference)
        if name in ("oracle", "mixed"):
            assert stats.tokens_per_round > 1.3


def test_a_caller_that_does_something_else_than_verify_gets_a_draft_of_its_text():
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    reference = generate(target, prompt)
    drafter = asynchronous(oracle_drafter(reference, block_size=4))
    drafts = AsyncDrafts(call_of(target, prompt, drafter))
    try:
        for length in (6, 7, 14, 9, 10, 30):  # jumps ahead and back are no verdicts
            tree = drafts.next(reference[0, :length], room=60 - length - 1)
            if length in (7, 10):
                assert tree.tokens.tolist() == reference[0, length : length + 4].tolist()
            else:
                assert len(tree) == 0
    finally:
        drafts.close()


@pytest.mark.parametrize("seed", range(12))
def test_whichever_side_is_faster_changes_nothing(seed, monkeypatch):
    """25 short generations each, 300 in all; in each round one side waits for the other, or neither does."""
    rng = random.Random(seed)
    target, twin = tiny_model("llama", seed=seed), tiny_model("qwen3", seed=seed)
    forward = target.forward
    for turn in range(25):
        prompt = prompt_of(1 + turn % 9, seed=25 * seed + turn)
        reference = generate(target, prompt, max_new_tokens=12)
        if turn % 5:
            drafter = acceptance_profile_drafter(reference, [0.9, 0.6], seed=turn, block_size=4)
        else:
            drafter = D3DDrafterForCausalLM.from_backbone(twin, block_size=4)
        with monkeypatch.context() as patch:
            Orders(target, patch, lambda: rng.choice(["draft", "verify", "free"]))
            output = generate(target, prompt, asynchronous(drafter, num_bonus_guesses=turn % 3), max_new_tokens=12)
        target.forward = forward
        assert output.tolist() == reference.tolist()
        assert drafter.last_generation_stats.num_errors == 0


def test_drafting_runs_beside_verification():
    """A forward of the target ends only when a packed pass has begun and ended meanwhile: in turns it would not."""
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    reference = generate(target, prompt, max_new_tokens=12)
    drafter = asynchronous(oracle_drafter(reference, block_size=4), num_bonus_guesses=0)
    verifying, drafted = threading.Semaphore(0), threading.Semaphore(0)
    forward, packed, rounds = target.forward, drafter.packed_forward, []

    @functools.wraps(forward)
    def meet_forward(*args, **kwargs):
        rounds.append(None)
        verifying.release()
        if len(rounds) <= 2:  # the last rounds have no pass beside them
            assert drafted.acquire(timeout=20)
        return forward(*args, **kwargs)

    def meet_packed(*args, **kwargs):
        assert verifying.acquire(timeout=20)
        outputs = packed(*args, **kwargs)
        drafted.release()
        return outputs

    target.forward, drafter.packed_forward = meet_forward, meet_packed
    output = generate(target, prompt, drafter, max_new_tokens=12)
    target.forward = forward
    assert torch.equal(output, reference) and drafter.last_generation_stats.num_errors == 0


# Sampling


@pytest.mark.parametrize(
    "law, kind, options",
    [
        ("plain", "own", {"num_bonus_guesses": 0}),
        ("plain", "own", {"num_bonus_guesses": 3}),
        ("temperature", "other", {"num_bonus_guesses": 2}),
        ("top_k", "own", {"num_bonus_guesses": 2, "bonus_guess_source": "slots"}),
        ("top_p", "own", {"draft_slot_budget": 12}),
    ],
)
def test_transitions_follow_the_targets_law(law, kind, options):
    target = memoryless_model(VOCAB_SIZE, seed=1)
    drafter = asynchronous(drafter_of(kind), **options)
    counts = transitions(target, drafter, LAWS[law], num_generations=6)
    assert transition_p_value(counts, target, LAWS[law]) > 1e-4 / NUM_TESTS
    hits = drafter.last_generation_stats.num_hits
    assert hits.get("masked", 0) + hits.get("guessed", 0) > 0
    if options.get("num_bonus_guesses"):
        assert hits["guessed"] > 0


@pytest.mark.parametrize("order", ["draft", "verify", "free", "inline"])
def test_same_seed_same_ids_threaded_or_inline_whichever_side_is_faster(order, monkeypatch):
    target = memoryless_model(VOCAB_SIZE, seed=1)
    prompt = torch.tensor([[2, 3]])

    def sample(seed, drafter=None):
        torch.manual_seed(seed)
        return target.generate(prompt, max_new_tokens=30, do_sample=True, assistant_model=drafter).tolist()

    plain, other = sample(5), sample(6)
    drafter = asynchronous(drafter_of("own"))
    if order == "inline":
        monkeypatch.setattr(AsyncDrafts, "_make_worker", lambda self, drafter: InlineWorker())
    else:
        Orders(target, monkeypatch, lambda: order)
    assert sample(5, drafter) == plain != other
    assert drafter.last_generation_stats.num_rounds < 30 and drafter.last_generation_stats.num_errors == 0


# Faults


def failing(kind, release=None):
    def packed_forward(*args, **kwargs):
        if kind == "raises":
            raise RuntimeError("planned failure")
        if kind == "out of memory":
            raise torch.OutOfMemoryError("planned: no memory left")
        if kind == "hangs":
            release.wait(30)
        return None

    return packed_forward


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("kind", ["raises", "out of memory", "hangs", "nan"])
def test_a_failure_ends_drafting_with_one_warning_or_raises(kind, after, caplog, monkeypatch):
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    reference, release = generate(target, prompt), threading.Event()
    threads = threading.active_count()

    def wait_at_most(seconds):
        monkeypatch.setattr(async_drafts, "_WAIT_S", seconds)

    for action in ("warn", "raise"):
        drafter = asynchronous(D3DDrafterForCausalLM.from_backbone(target, block_size=4), on_draft_error=action)
        packed, calls = drafter.packed_forward, []

        def packed_forward(*args, packed=packed, calls=calls, **kwargs):
            calls.append(None)
            if len(calls) <= after:
                return packed(*args, **kwargs)
            if kind == "nan":
                outputs = packed(*args, **kwargs)
                for name in ("logits", "hidden_states"):
                    value = getattr(outputs, name)
                    if value is not None:
                        value = tuple(t * float("nan") for t in value) if isinstance(value, tuple) else value
                        setattr(outputs, name, value)
                return outputs
            return failing(kind, release)(*args, **kwargs)

        drafter.packed_forward = packed_forward
        wait_at_most(1.0 if kind == "hangs" else 60.0)  # a busy machine may stop for seconds
        start = time.monotonic()
        if action == "warn":
            assert torch.equal(generate(target, prompt, drafter), reference)
            assert caplog.text.count("Drafting failed") == 1
            assert drafter.last_generation_stats.num_errors == 1
        else:
            with pytest.raises(RuntimeError, match="Drafting failed"):
                generate(target, prompt, drafter)
        assert time.monotonic() - start < 5 + 2  # the bound is 5 s; the rest is for a busy machine
        release.set()
        del drafter.packed_forward
        wait_at_most(60.0)
        assert torch.equal(generate(target, prompt, drafter), reference)
        assert drafter.last_generation_stats.num_errors == 0
        release.clear()
    release.set()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert threading.active_count() == threads


def test_an_interruption_leaves_no_job_no_cache_and_the_threads_as_they_were(monkeypatch):
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = asynchronous(D3DDrafterForCausalLM.from_backbone(target, block_size=4))
    made, make = [], PackedSession.__init__
    monkeypatch.setattr(PackedSession, "__init__", lambda self, *a, **k: made.append(self) or make(self, *a, **k))
    torch.set_num_threads(2)
    reference = generate(target, prompt)
    forward, calls, threads = target.forward, [], threading.active_count()

    @functools.wraps(forward)
    def interrupted(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    target.forward = interrupted
    with pytest.raises(KeyboardInterrupt) as kept_traceback:
        generate(target, prompt, drafter)
    target.forward = forward
    assert threading.active_count() == threads and torch.get_num_threads() == 2
    assert len(made) == 1 and made[0].num_cached == 0 and made[0]._cache is None
    assert torch.equal(generate(target, prompt, drafter), reference)
    assert torch.get_num_threads() == 2
    del kept_traceback


# Around a generation


def test_after_a_generation_the_drafter_is_an_ordinary_model(tmp_path):
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = asynchronous(D3DDrafterForCausalLM.from_backbone(target, block_size=4))
    generate(target, prompt, drafter)
    for twin in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert twin.last_generation_stats == drafter.last_generation_stats
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = D3DDrafterForCausalLM.from_pretrained(tmp_path / "drafter")
    assert loaded.generation_config.drafting_mode == "async"
    rows = [{"input_ids": prompt_of(12, seed=i)[0].tolist(), "prompt_length": 3} for i in range(4)]
    args = D3DTrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=1, report_to=[], use_cpu=True, dataloader_num_workers=1,
        save_strategy="no", disable_tqdm=True, per_device_train_batch_size=2,
    )  # fmt: skip
    D3DTrainer(drafter, args, train_dataset=rows).train()


def test_fifty_generations_leave_threads_and_caches_where_they_were():
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = asynchronous(D3DDrafterForCausalLM.from_backbone(target, block_size=4))
    generate(target, prompt, drafter, max_new_tokens=6)
    gc.collect()
    threads = threading.active_count()
    held = sum(isinstance(obj, torch.Tensor) for obj in gc.get_objects())
    for _ in range(50):
        generate(target, prompt, drafter, max_new_tokens=6)
    gc.collect()
    assert threading.active_count() == threads
    assert sum(isinstance(obj, torch.Tensor) for obj in gc.get_objects()) <= held + 5


def test_two_threads_generate_with_one_drafter_and_one_target_at_once():
    target = tiny_model("llama", seed=11)
    drafter = asynchronous(D3DDrafterForCausalLM.from_backbone(tiny_model("qwen3", seed=11), block_size=4))
    prompts = [prompt_of(4 + i, seed=i) for i in range(8)]
    references = [generate(target, prompt, max_new_tokens=20).tolist() for prompt in prompts]
    outputs = [None] * len(prompts)

    def work(first):
        torch.set_num_threads(1)
        for i in range(first, len(prompts), 2):
            outputs[i] = generate(target, prompts[i], drafter, max_new_tokens=20).tolist()

    workers = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert outputs == references


def test_one_drafter_with_two_targets_in_turn():
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("qwen3", seed=11), block_size=4)
    targets = [tiny_model("llama", seed=1), tiny_model("gemma3", seed=2)]
    for turn in range(4):
        assert_same_asynchronously(targets[turn % 2], prompt_of(5 + turn, turn), drafter, max_new_tokens=12)


@pytest.mark.parametrize("ending", ["in a streamer", "with a pass running", "with a pass that hangs"])
def test_a_process_that_ends_during_a_generation_ends_cleanly(ending):
    code = f"""
        import copy, sys, threading, torch
        from d3d_hf import D3DDrafterForCausalLM
        from d3d_hf.decoding.async_drafts import AsyncDrafts
        from d3d_hf.model.drafting_options import DraftingOptions
        from d3d_hf.model.generation_hook import Call
        from d3d_hf.testing import tiny_model
        torch.set_num_threads(1)
        target = tiny_model("llama")
        drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
        drafter.generation_config.drafting_mode = "async"
        prompt = torch.randint(2, 67, (1, 6))
        class Streamer:
            calls = 0
            def put(self, value):
                self.calls += 1
                if self.calls == 4: sys.exit(0)
            def end(self): pass
        if {ending!r} == "in a streamer":
            target.generate(prompt, max_new_tokens=500, assistant_model=drafter, streamer=Streamer())
            sys.exit(3)
        if {ending!r} == "with a pass that hangs":
            drafter.packed_forward = lambda *args, **kwargs: threading.Event().wait()
        config = copy.deepcopy(target.generation_config)
        config.max_length = 500
        options = DraftingOptions.resolve(config, drafter.generation_config, 4)
        drafts = AsyncDrafts(Call(target, drafter, prompt, config, dict(), options))
        drafts.next(prompt[0], room=400)
        assert drafts._pending is not None
    """
    start = time.monotonic()
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - start < 60, "no hang"


# Statistics


def test_statistics_go_to_json_and_to_a_trace(tmp_path):
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = asynchronous(D3DDrafterForCausalLM.from_backbone(target, block_size=4))
    generate(target, prompt, drafter)
    stats = drafter.last_generation_stats
    json.dumps(vars(stats))
    assert 0 <= stats.overlap <= 1 and stats.wait_ms >= 0
    stats.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert lanes == {1: "target", 2: "drafter"}
    assert {event["tid"] for event in spans} == {1, 2} and all(event["dur"] >= 0 for event in spans)
    assert sum(event["tid"] == 1 for event in spans) == stats.num_rounds


def test_overlap_is_the_hidden_share_of_drafting():
    from d3d_hf import GenerationStats

    spans = [("verify", 0, 10), ("draft", 2, 6), ("verify", 12, 20), ("draft", 8, 14), ("draft", 21, 23)]
    stats = GenerationStats(spans=sorted(spans, key=lambda span: span[1]))
    assert stats.overlap == pytest.approx((4 + 2 + 2) / (4 + 6 + 2))
    assert GenerationStats().overlap == 0


def test_the_timeline_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    target = tiny_model("llama", seed=11)
    drafter = asynchronous(D3DDrafterForCausalLM.from_backbone(target, block_size=4))
    generate(target, prompt_of(), drafter)
    drafter.last_generation_stats.plot(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_first_round_is_clean(inline):
    """The inline worker runs the same schedule, first round included."""
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    reference = generate(target, prompt)
    drafter = oracle_drafter(reference, block_size=BLOCK_SIZE)
    stats = assert_same_asynchronously(target, prompt, drafter, num_forwards=7, reference=reference)
    assert stats.overlap == 0
