"""Under sampling the law of the output is the target's own.

The target's law is known exactly: its next token depends on the last one alone, so that the transitions of a few long
generations give one chi-square. Seeds are fixed; every bound is p > 1e-4, corrected for the number of tests here.
"""

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chi2
from transformers import GenerationConfig

import d3d_hf
from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model.token_chooser import TokenChooser, warpers_of
from d3d_hf.model.verification import warp
from d3d_hf.testing import ForwardCounter, memoryless_model, tiny_model, transition_logits


VOCAB_SIZE = 7
NUM_TESTS = 20
LAWS = {
    "plain": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "temperature": {"temperature": 0.6, "top_k": 0, "top_p": 1.0},
    "top_k": {"temperature": 1.3, "top_k": 4, "top_p": 1.0},
    "top_p": {"temperature": 0.9, "top_k": 0, "top_p": 0.8},
}


def p_value(observed: torch.Tensor, expected: torch.Tensor, num_constraints: int) -> float:
    """Of the chi-square; outcomes that are expected less than five times are pooled."""
    common = expected >= 5
    rare_observed, rare_expected = observed[~common].sum(), expected[~common].sum()
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum()
    if rare_expected >= 5:
        chi_square += (rare_observed - rare_expected) ** 2 / rare_expected
    return float(chi2.sf(float(chi_square), int(common.sum()) - num_constraints))


def warped_probs(logits, law):
    """The target's probabilities as transformers warps them, shape of `logits`."""
    return warp(logits, warpers_of(GenerationConfig(**law))).softmax(-1)


@pytest.fixture(scope="module")
def target():
    return memoryless_model(VOCAB_SIZE, seed=1)


def drafter_of(kind):
    """`own`: the target's first token and guesses; `other`: another law altogether, often rejected."""
    model = memoryless_model(VOCAB_SIZE, seed={"own": 1, "other": 2}[kind], spread=1.5)
    return D3DDrafterForCausalLM.from_backbone(model, block_size=4)


def transitions(target, drafter, law, num_generations=10, length=600):
    """Counts of (last token, next token), shape `(vocab, vocab)`."""
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for seed in range(num_generations):
        torch.manual_seed(seed)
        prompt = torch.tensor([[2, 3]])
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=length,
            do_sample=True,
            assistant_model=drafter,
            **law,
        )[0, 1:]
        counts.index_put_((output[:-1], output[1:]), torch.ones(length), accumulate=True)
    return counts


def transition_p_value(counts, target, law):
    probs = warped_probs(transition_logits(target), law)
    assert not counts[probs == 0].any(), "a token of probability zero came out"
    expected = counts.sum(dim=1, keepdim=True) * probs
    return p_value(counts.flatten(), expected.flatten(), num_constraints=VOCAB_SIZE)


@pytest.mark.parametrize("kind", ["own", "other"])
@pytest.mark.parametrize("law", LAWS)
def test_transitions_follow_the_targets_law(target, law, kind):
    drafter = drafter_of(kind)
    with ForwardCounter(target) as forwards:
        counts = transitions(target, drafter, LAWS[law])
    assert transition_p_value(counts, target, LAWS[law]) > 1e-4 / NUM_TESTS
    assert forwards.count < (0.75 if kind == "own" else 0.98) * 6000, "drafts must be accepted at all"


def test_several_denoising_steps_follow_the_targets_law(target):
    drafter = drafter_of("own")
    drafter.generation_config.num_denoising_steps = 3
    counts = transitions(target, drafter, LAWS["plain"])
    assert transition_p_value(counts, target, LAWS["plain"]) > 1e-4 / NUM_TESTS


def test_the_stock_protocol_follows_the_targets_law(target):
    d3d_hf.uninstall_generation_hook()
    try:
        counts = transitions(target, drafter_of("own"), LAWS["temperature"], num_generations=5)
    finally:
        d3d_hf.install_generation_hook()
    assert transition_p_value(counts, target, LAWS["temperature"]) > 1e-4 / NUM_TESTS


def test_the_chi_square_finds_an_argmax_draft_with_a_soft_law(target, monkeypatch):
    """Negative control: the classic mistake must be found with the same number of tokens."""
    choose = TokenChooser.choose

    def argmax_with_soft_law(self, logits):
        _, law = choose(self, logits)
        return law.argmax(-1), law

    monkeypatch.setattr(TokenChooser, "choose", argmax_with_soft_law)
    counts = transitions(target, drafter_of("own"), LAWS["plain"], num_generations=3)
    assert transition_p_value(counts, target, LAWS["plain"]) < 1e-9


def enumerated_law(target, prompt, length, law, eos=None):
    """Probability of every output of `length` tokens, or fewer where it ends in `eos`."""
    vocab_size = target.config.vocab_size
    outputs = {(): 1.0}
    for _ in range(length):
        grown = {}
        for output, probability in outputs.items():
            if output and output[-1] == eos:
                grown[output] = probability
                continue
            ids = torch.cat([prompt, torch.tensor([output], dtype=torch.long)], dim=1)
            with torch.no_grad():
                probs = warped_probs(target(ids).logits[:, -1].float(), law)[0]
            grown.update({(*output, token): probability * float(probs[token]) for token in range(vocab_size)})
        outputs = grown
    return {output: probability for output, probability in outputs.items() if probability > 0}


@pytest.mark.parametrize("eos", [None, 3])
def test_three_tokens_follow_the_enumerated_law(eos):
    """A target with attention, every output of three tokens enumerated; EOS inside the block, too."""
    target = tiny_model("qwen3", seed=6, vocab_size=4, initializer_range=0.3)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=3)
    prompt, law, num_samples = torch.tensor([[2, 1]]), LAWS["temperature"], 1500
    counts = Counter()
    for _ in range(num_samples):
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=4,
            do_sample=True,
            eos_token_id=eos,
            pad_token_id=0,
            assistant_model=drafter,
            **law,
        )
        counts[tuple(output[0, 2:5].tolist())] += 1
    expected = enumerated_law(target, prompt, 3, law, eos)
    assert set(counts) <= set(expected)
    observed = torch.tensor([counts[output] for output in expected], dtype=torch.float)
    probabilities = torch.tensor(list(expected.values()))
    assert p_value(observed, num_samples * probabilities, num_constraints=1) > 1e-4 / NUM_TESTS


def test_drafts_are_drawn_from_the_law_handed_over(target):
    drafter = drafter_of("other")
    config = GenerationConfig(do_sample=True, max_length=99, **LAWS["top_k"])
    generator = drafter.make_candidate_generator(target, config, model_kwargs={})
    prompt = torch.tensor([[2, 3]])
    num_draws, counts, law = 1500, torch.zeros(4, VOCAB_SIZE), None
    for _ in range(num_draws):
        ids, handed = generator.get_candidates(prompt)
        assert law is None or torch.equal(law, handed)
        law = handed
        counts[torch.arange(4), ids[0, 2:]] += 1
    expected = num_draws * law[0].softmax(-1)
    assert law.dtype == torch.float32 and law.shape == (1, 4, VOCAB_SIZE)
    assert not counts[expected == 0].any()
    assert p_value(counts.flatten(), expected.flatten(), num_constraints=4) > 1e-4 / NUM_TESTS


def test_same_seed_same_ids():
    target = memoryless_model(VOCAB_SIZE, seed=1)
    drafter = drafter_of("own")

    def sample(seed):
        torch.manual_seed(seed)
        prompt = torch.tensor([[2, 3]])
        return target.generate(prompt, max_new_tokens=40, do_sample=True, assistant_model=drafter).tolist()

    outputs = [sample(seed) for seed in (5, 5, 6)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_slots_are_drawn_independently_given_the_text(target):
    """The handed laws are a product law, so pairs of slots must be independent."""
    drafter = drafter_of("other")
    config = GenerationConfig(do_sample=True, max_length=99, **LAWS["plain"])
    generator = drafter.make_candidate_generator(target, config, model_kwargs={})
    pairs = Counter()
    num_draws = 1500
    for _ in range(num_draws):
        ids, law = generator.get_candidates(torch.tensor([[2, 3]]))
        pairs[tuple(ids[0, 2:4].tolist())] += 1
    probs = law[0].softmax(-1)
    every = list(itertools.product(range(VOCAB_SIZE), repeat=2))
    observed = torch.tensor([pairs[pair] for pair in every], dtype=torch.float)
    expected = num_draws * (probs[0, :, None] * probs[1, None, :]).flatten()
    assert p_value(observed, expected, num_constraints=1) > 1e-4 / NUM_TESTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "law", [{"temperature": 0.7, "top_k": 3, "top_p": 1.0}, LAWS["top_p"]], ids=["top_k", "top_p"]
)
@pytest.mark.parametrize("num_steps", [2, 3])
def test_several_steps_with_cut_laws_over_many_tokens(target, num_steps, law):
    """The long grid: five times the tokens of the tests above."""
    drafter = drafter_of("own")
    drafter.generation_config.num_denoising_steps = num_steps
    counts = transitions(target, drafter, law, num_generations=50)
    assert transition_p_value(counts, target, law) > 1e-4 / NUM_TESTS
