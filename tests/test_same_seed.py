"""Same seed, same ids: with a drafter generate draws what it draws without one, and leaves the generator there."""

import functools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from beside_plain import assert_as_plain, fewest_forwards, num_new_tokens, run
from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.testing import (
    ARCHITECTURES,
    acceptance_profile_drafter,
    anti_oracle_drafter,
    noisy_oracle_drafter,
    oracle_drafter,
    tiny_model,
)
from lossless import prompt_of
from test_real_model import PROMPTS, encode


SHIPPED_DRAFTER = Path(__file__).resolve().parent.parent / "hub_cards" / "d3d-smollm2-135m"
NUM_SAMPLED, NUM_GREEDY = 300, 60
MODES = ("sync", "async", "auto")


@functools.cache
def target_of(architecture, spread):
    return tiny_model(architecture, seed=11, initializer_range=spread)


@functools.cache
def random_drafter(block_size):
    return D3DDrafterForCausalLM.from_backbone(tiny_model("qwen3", seed=99), block_size=block_size)


@functools.cache
def self_drafter(architecture, spread, block_size):
    """The target's own layers: drafts that are partly right."""
    return D3DDrafterForCausalLM.from_backbone(target_of(architecture, spread), block_size=block_size)


DRAFTERS = {
    "oracle": oracle_drafter,
    "noisy": functools.partial(noisy_oracle_drafter, wrong_slots=[2]),
    "mixed": functools.partial(acceptance_profile_drafter, profile=[0.9, 0.7, 0.5]),
    "anti": anti_oracle_drafter,
    "random": None,
    "self": None,
}


def drawn_law(rng) -> dict:
    """Arguments that change the law that tokens are drawn from, each left out half of the time."""
    choices = {
        "temperature": [0.3, 0.7, 1.3, 2.0],
        "top_k": [3, 12, 50],
        "top_p": [0.3, 0.7, 0.95],
        "min_p": [0.02, 0.2],
        "typical_p": [0.5, 0.9],
        "repetition_penalty": [0.8, 1.2, 1.7],
        "no_repeat_ngram_size": [1, 2, 3],
    }
    law = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.5}
    return {"top_k": 0, **law}


def check_one_setting(seed, do_sample):
    rng = random.Random(seed)
    architecture, spread = rng.choice(ARCHITECTURES), rng.choice([0.2, 0.5])
    target = target_of(architecture, spread)
    padding = rng.choice([0, 0, 0, 1, 5])
    prompt = prompt_of(rng.randint(1, 24) + padding, seed)
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    ends = rng.sample(range(2, 67), rng.choice([0, 1, 3, 8]))
    law = drawn_law(rng)
    if not do_sample:
        law = {name: law[name] for name in ("repetition_penalty", "no_repeat_ngram_size") if name in law}
    options = {
        "do_sample": do_sample,
        "max_new_tokens": rng.randint(1, 26),
        "attention_mask": mask,
        "eos_token_id": ends or None,
        "pad_token_id": 0,
        **law,
    }
    mode, kind, block_size = rng.choice(MODES), rng.choice(list(DRAFTERS)), rng.choice([1, 3, 5, 8])
    tree_size, num_steps, from_text = rng.choice([0, 0, 2, 12, "auto"]), rng.choice([1, 1, 2]), rng.random() < 0.7
    setting = (
        f"{architecture} {spread}, {mode}, {kind}, blocks of {block_size}, trees of {tree_size}, {num_steps} steps, "
        f"from text {from_text}, padding {padding}, {options}"
    )

    plain = run(target, prompt, seed=seed, **options)
    if kind == "random":
        drafter = random_drafter(block_size)
    elif kind == "self":
        drafter = self_drafter(architecture, spread, block_size)
    else:
        drafter = DRAFTERS[kind](plain.ids[:, padding:], block_size=block_size)
    for name, value in {
        "drafting_mode": mode,
        "draft_tree_size": tree_size,
        "draft_from_text": from_text,
        "num_denoising_steps": num_steps,
        "compile_drafter": False,
        "on_draft_error": "raise",
    }.items():
        setattr(drafter.generation_config, name, value)
    ours = run(target, prompt, drafter, seed=seed, **options)

    assert ours.ids.tolist() == plain.ids.tolist(), setting
    assert_as_plain(ours, plain, drafter)
    assert drafter.last_generation_stats.mode == mode
    num_tokens = num_new_tokens(plain, prompt)
    at_most = num_tokens
    if mode != "auto" and tree_size != "auto":
        depth = min(tree_size, block_size) or block_size  # 0 nodes stand for a chain
        num_alone = 1 if mode == "async" else 0  # the first round has no draft
        if kind == "oracle":
            at_most = num_alone + fewest_forwards(num_tokens - num_alone, depth)
        elif kind == "noisy" and mode == "sync":
            at_most = fewest_forwards(num_tokens, min(2, depth))
    assert ours.num_forwards <= at_most, setting
    assert kind != "anti" or tree_size != 0 or ours.num_forwards == num_tokens, setting


@pytest.mark.parametrize("seed", range(NUM_SAMPLED))
def test_sampling_draws_what_plain_decoding_draws(seed):
    check_one_setting(seed, do_sample=True)


@pytest.mark.parametrize("seed", range(NUM_SAMPLED, NUM_SAMPLED + NUM_GREEDY))
def test_greedy_decoding_chooses_what_plain_decoding_chooses(seed):
    check_one_setting(seed, do_sample=False)


def test_a_seed_decides_and_calls_that_follow_one_another_go_on_with_the_generator():
    """Two calls in a row from one seed: the second begins where the first has left the generator."""
    target, prompt = target_of("llama", 0.2), prompt_of()

    def two_in_a_row(drafter, seed):
        torch.manual_seed(seed)
        return [
            target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=True, top_k=0).tolist()
            for _ in range(2)
        ]

    plain = two_in_a_row(None, 5)
    drafter = self_drafter("llama", 0.2, 5)
    drafter.generation_config.drafting_mode = "sync"
    assert plain[0] != plain[1] and plain != two_in_a_row(None, 6)
    assert two_in_a_row(drafter, 5) == plain
    assert two_in_a_row(drafter, 6) == two_in_a_row(None, 6)


@pytest.fixture(scope="module")
def embedded_models(embedded_target):
    """The embedded target in float32, its tokenizer, and the shipped drafter."""
    _, tokenizer = embedded_target
    target = AutoModelForCausalLM.from_pretrained(embedded.target_folder(), dtype=torch.float32)
    return target, D3DDrafterForCausalLM.from_target(target, adapter=SHIPPED_DRAFTER), tokenizer


@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=[] if i < 3 else [pytest.mark.slow]) for i in range(len(PROMPTS))]
)
def test_the_embedded_target_samples_the_same_text_in_fewer_forwards(embedded_models, index):
    target, drafter, tokenizer = embedded_models
    inputs = encode(tokenizer, PROMPTS[index])
    options = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 20, "do_sample": True}
    plain, ours = (
        run(target, inputs["input_ids"], assistant, seed=index, temperature=0.7, **options)
        for assistant in (None, drafter)
    )
    assert_as_plain(ours, plain, drafter)
    assert ours.num_forwards <= 0.8 * num_new_tokens(plain, inputs["input_ids"])
