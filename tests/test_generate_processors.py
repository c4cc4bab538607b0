"""Logits processors: each built-in one at least once, a user's own, and sampling warpers that the drafter lacks."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig

from d3d_hf.testing import ARCHITECTURES, noisy_oracle_drafter, oracle_drafter, tiny_model
from lossless import PROMPT_LENGTH, assert_same_for_every_drafter, drafters_of, generate, prompt_of


@pytest.fixture(scope="module")
def target():
    # Small weights: flat laws, on which processors change the choice of token.
    return tiny_model("llama", seed=11, initializer_range=0.2)


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[44], [66, 62], [40, 41, 42]]},
    "sequence_bias": {"sequence_bias": [[[5], 4.0], [[9, 7], -3.0]]},
    "suppress": {"suppress_tokens": list(range(20, 45))},
    "begin_suppress": {"begin_suppress_tokens": list(range(2, 60))},
    "forced_eos": {"forced_eos_token_id": 8, "eos_token_id": 8, "pad_token_id": 0},
    "min_length": {"min_length": PROMPT_LENGTH + 12, "eos_token_id": list(range(2, 30)), "pad_token_id": 0},
    "min_new_tokens": {"min_new_tokens": 15, "eos_token_id": list(range(2, 30)), "pad_token_id": 0},
    "exponential_decay": {
        "exponential_decay_length_penalty": (5, 1.3),
        "eos_token_id": 8,
        "pad_token_id": 0,
    },
    "remove_invalid": {"remove_invalid_values": True},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * 3 + k) % 67 for k in range(5)]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_built_in_processors(target, name):
    prompt, kwargs = prompt_of(), PROCESSORS[name]
    plain = generate(target, prompt)
    processed = assert_same_for_every_drafter(target, prompt, **kwargs)
    if name not in ("remove_invalid",):
        assert processed.tolist() != plain.tolist(), "the processor must matter in this test"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_several_processors_at_once(architecture):
    target = tiny_model(architecture, seed=11, initializer_range=0.2)
    kwargs = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [3, 4, 5], "min_new_tokens": 9}
    assert_same_for_every_drafter(target, prompt_of(), eos_token_id=[7, 8], pad_token_id=0, **kwargs)


class PositionBias(LogitsProcessor):
    """A user's own processor, a function of the prefix: forbids the token `length % vocab` and what came two ago."""

    def __init__(self):
        self.lengths_seen = []

    def __call__(self, input_ids, scores):
        self.lengths_seen.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, input_ids.shape[1] % scores.shape[1]] = float("-inf")
        scores[:, input_ids[0, -2:]] -= 3.0
        return scores


def test_a_users_own_processor(target):
    assert_same_for_every_drafter(target, prompt_of(), make_kwargs=lambda: {"logits_processor": [PositionBias()]})


def test_processors_are_called_by_transformers_alone(target):
    """On every drafted prefix and one token more, in order: drafting adds no call of its own."""
    prompt, processor = prompt_of(), PositionBias()
    reference = generate(target, prompt, logits_processor=[PositionBias()])
    drafter = noisy_oracle_drafter(reference, [2], block_size=4)
    assert torch.equal(generate(target, prompt, drafter, logits_processor=[processor]), reference)
    stats = drafter.last_generation_stats
    assert len(processor.lengths_seen) == stats.num_drafted + stats.num_rounds


class OneCallPerToken(LogitsProcessor):
    """Counts its calls and forbids a token at every third: a state that knows nothing of rejected prefixes."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls % 3 == 0:
            scores = scores.clone()
            scores[:, scores.argmax()] = float("-inf")
        return scores


def test_stateful_processors_are_a_documented_limit_of_every_assistant(target):
    """The text differs from plain generation, in the same way under transformers' own assistants."""
    prompt = prompt_of()
    plain = generate(target, prompt, logits_processor=[OneCallPerToken()])
    drafted = generate(target, prompt, oracle_drafter(plain), logits_processor=[OneCallPerToken()])
    stock = generate(target, prompt, tiny_model("llama", seed=5), logits_processor=[OneCallPerToken()])
    assert drafted.shape == plain.shape
    assert not torch.equal(stock, plain)


SAMPLING = {
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5},
    "top_h": {"top_h": 0.4},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.3},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_stays_within_what_the_warpers_allow(target, name):
    """Whatever the drafter proposes, no emitted token has probability zero under the target's warped law."""
    prompt, kwargs = prompt_of(), {"top_k": 0, **SAMPLING[name]}
    reference = generate(target, prompt)
    for drafter_name, drafter in drafters_of(reference).items():
        torch.manual_seed(0)
        output = generate(
            target, prompt, drafter, do_sample=True, return_dict_in_generate=True, output_scores=True, **kwargs
        )
        new = output.sequences[0, PROMPT_LENGTH:]
        assert len(output.scores) == len(new) == 33
        chosen = torch.cat(output.scores).gather(1, new[:, None])
        assert torch.isfinite(chosen).all(), drafter_name


@pytest.mark.parametrize(
    "kwargs",
    [
        {"guidance_scale": 1.5},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
    ],
)
def test_built_in_processors_with_a_state_run_plain_with_one_warning(target, kwargs, caplog):
    """They count on one call per token, so that drafting would change the text."""
    prompt = prompt_of()
    drafter = oracle_drafter(generate(target, prompt))
    for _ in range(2):
        torch.manual_seed(1)
        reference = generate(target, prompt, do_sample=True, **kwargs)
        torch.manual_seed(1)
        assert torch.equal(generate(target, prompt, drafter, do_sample=True, **kwargs), reference)
    assert caplog.text.count("must be called once per token") == 1


def test_a_forced_first_token(target):
    assert_same_for_every_drafter(target, prompt_of(1), forced_bos_token_id=9)


def test_nobodys_config_is_modified(target):
    prompt = prompt_of()
    config = GenerationConfig(max_new_tokens=12, do_sample=False, num_assistant_tokens=2)
    drafter = oracle_drafter(generate(target, prompt))
    before = config.to_dict(), target.generation_config.to_dict(), drafter.generation_config.to_dict()
    target.generate(prompt, generation_config=config, assistant_model=drafter)
    assert before == (config.to_dict(), target.generation_config.to_dict(), drafter.generation_config.to_dict())
