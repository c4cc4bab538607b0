"""Logits processors, with a state or without: each built-in one at least once, and a user's own; sampling warpers."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig

from d3d_hf.model.drafting_options import DraftingOptions
from d3d_hf.testing import ARCHITECTURES, ForwardCounter, oracle_drafter, tiny_model
from lossless import PROMPT_LENGTH, assert_same, assert_same_for_every_drafter, drafters_of, generate, prompt_of


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


def test_processors_see_what_they_see_in_plain_decoding(target):
    """Each true prefix once, in order, however many tokens a round accepts or rejects."""
    prompt, plain = prompt_of(), PositionBias()
    reference = generate(target, prompt, logits_processor=[plain])
    for name, drafter in drafters_of(reference).items():
        processor = PositionBias()
        with ForwardCounter(target) as forwards:
            assert torch.equal(generate(target, prompt, drafter, logits_processor=[processor]), reference)
        assert processor.lengths_seen == plain.lengths_seen == list(range(PROMPT_LENGTH, PROMPT_LENGTH + 33))
        assert forwards.count == {"oracle": 6, "anti": 33}.get(name, drafter.last_generation_stats.num_rounds)


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


class Grammar(LogitsProcessor):
    """As a constrained decoder: reads each new token, and rejects a text that is not the one that it has read."""

    def __init__(self):
        self.read = None

    def __call__(self, input_ids, scores):
        ids = input_ids[0].tolist()
        assert self.read is None or ids[:-1] == self.read, "a token was taken back, or read twice"
        self.read = ids
        allowed = torch.full_like(scores, float("-inf"))
        allowed[:, sum(ids) % 3 :: 3] = 0
        return scores + allowed


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("make", [OneCallPerToken, Grammar])
def test_processors_with_a_state(target, make, mode, monkeypatch):
    """Other assistants call them on text that is rejected later; here they are called once per emitted token."""
    monkeypatch.setattr(DraftingOptions, "drafting_mode", mode)
    prompt = prompt_of()
    reference = generate(target, prompt, logits_processor=[make()])
    for name, drafter in drafters_of(reference).items():
        assert_same(
            target,
            prompt,
            drafter,
            num_forwards={"oracle": {"sync": 6, "async": 7}[mode], "anti": 33}.get(name),
            reference=reference,
            make_kwargs=lambda: {"logits_processor": [make()]},
        )
    with pytest.raises(AssertionError, match="taken back, or read twice"):  # which makes the test worth its name
        generate(target, prompt, tiny_model("llama", seed=5), logits_processor=[Grammar()])


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
def test_sampled_ids_and_scores_are_those_of_plain_generation(target, name):
    """Under the same seed, whatever is drafted; so no token comes out that the warpers rule out."""
    prompt, kwargs = prompt_of(), {"top_k": 0, **SAMPLING[name]}

    def sample(drafter=None):
        torch.manual_seed(0)
        return generate(
            target, prompt, drafter, do_sample=True, return_dict_in_generate=True, output_scores=True, **kwargs
        )

    plain = sample()
    for drafter_name, drafter in drafters_of(plain.sequences).items():
        with ForwardCounter(target) as forwards:
            output = sample(drafter)
        assert torch.equal(output.sequences, plain.sequences), drafter_name
        assert forwards.count == {"oracle": 6, "anti": 33}.get(drafter_name, drafter.last_generation_stats.num_rounds)
        new = output.sequences[0, PROMPT_LENGTH:]
        assert len(output.scores) == len(new) == 33
        for ours, theirs in zip(output.scores, plain.scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert torch.isfinite(torch.cat(output.scores).gather(1, new[:, None])).all(), drafter_name


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"guidance_scale": 1.5},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
    ],
    ids=["guidance", "synth_id"],
)
def test_built_in_processors_with_a_state_are_drafted_for(target, kwargs, do_sample, caplog):
    """They count on one call per token, and get it. Guidance runs the target a second time for each token."""
    prompt = prompt_of()

    def sample(drafter=None):
        torch.manual_seed(1)
        with ForwardCounter(target) as forwards:
            return generate(target, prompt, drafter, do_sample=do_sample, **kwargs), forwards.count

    reference, num_plain = sample()
    assert not torch.equal(reference, generate(target, prompt)), "the processor must matter in this test"
    num_own = num_plain - 33  # the processor's
    assert num_own == (33 if "guidance_scale" in kwargs else 0)
    for name, drafter in drafters_of(reference).items():
        output, num_forwards = sample(drafter)
        assert torch.equal(output, reference), name
        stats = drafter.last_generation_stats
        assert stats.door == "loop" and num_forwards - num_own == stats.num_rounds
        assert stats.num_rounds == {"oracle": 6, "anti": 33}.get(name, stats.num_rounds)
    assert not caplog.records


def test_a_forced_first_token(target):
    assert_same_for_every_drafter(target, prompt_of(1), forced_bos_token_id=9)


def test_nobodys_config_is_modified(target):
    prompt = prompt_of()
    config = GenerationConfig(max_new_tokens=12, do_sample=False, num_assistant_tokens=2)
    drafter = oracle_drafter(generate(target, prompt))
    before = config.to_dict(), target.generation_config.to_dict(), drafter.generation_config.to_dict()
    target.generate(prompt, generation_config=config, assistant_model=drafter)
    assert before == (config.to_dict(), target.generation_config.to_dict(), drafter.generation_config.to_dict())
