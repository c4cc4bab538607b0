"""Under sampling the ids are those of plain generate under the same seed, and so the law is the target's own.

The target's law is known exactly: its next token depends on the last one alone, so that the transitions of a few long
generations give one chi-square. Seeds are fixed; every bound is p > 1e-4, corrected for the number of tests here.
"""

from collections import Counter

import pytest
import torch
from scipy.stats import chi2
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.decoding.walk import Walk
from d3d_hf.model import generation_hook
from d3d_hf.testing import ForwardCounter, memoryless_model, tiny_model, transition_logits
from lossless import drafters_of, generate, prompt_of


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
    warpers = LogitsProcessorList([TemperatureLogitsWarper(law["temperature"])])
    if law["top_k"]:
        warpers.append(TopKLogitsWarper(law["top_k"]))
    if law["top_p"] < 1:
        warpers.append(TopPLogitsWarper(law["top_p"]))
    rows = logits.reshape(-1, logits.shape[-1])
    return warpers(torch.zeros(len(rows), 1, dtype=torch.long), rows).softmax(-1).view_as(logits)


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


def test_the_second_door_follows_the_targets_law(target, monkeypatch):
    """transformers' own assisted loop draws for rejected tokens too: other ids than plain's, and the same law."""
    monkeypatch.setattr(generation_hook, "_doors", [door for door in generation_hook._doors if door.name != "loop"])
    drafter = drafter_of("own")
    with ForwardCounter(target) as forwards:
        counts = transitions(target, drafter, LAWS["temperature"], num_generations=5)
    assert drafter.last_generation_stats.door == "candidate generator"
    assert forwards.count < 0.75 * 3000, "drafts must be accepted at all"
    assert transition_p_value(counts, target, LAWS["temperature"]) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("law", ["plain", "top_k"])
def test_the_chi_square_finds_a_walk_that_prefers_drafts(target, law, monkeypatch):
    """Negative control: where the token drawn is none of the draft's, this walk draws once more."""
    call, choose = Walk.__call__, Walk._choose

    def with_a_look_at_the_draft(self, tree, output):
        self.drafted = set(tree.tokens.tolist())
        return call(self, tree, output)

    def choose_again(self, logits):
        token = choose(self, logits)
        return token if token in self.drafted else choose(self, logits)

    monkeypatch.setattr(Walk, "__call__", with_a_look_at_the_draft)
    monkeypatch.setattr(Walk, "_choose", choose_again)
    counts = transitions(target, drafter_of("own"), LAWS[law], num_generations=3)
    assert transition_p_value(counts, target, LAWS[law]) < 1e-9


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


def sampled(target, prompt, seed, drafter=None, **kwargs):
    """Ids, and where the global generator stands afterwards."""
    torch.manual_seed(seed)
    output = generate(target, prompt, drafter, do_sample=True, **kwargs)
    return output.tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("mode", ["sync", "async", "auto"])
@pytest.mark.parametrize("law", ["temperature", "top_p"])
def test_the_same_seed_gives_the_ids_of_plain_generate(law, mode):
    """Whatever is drafted; and the global generator is left where plain generate leaves it."""
    target, prompt, law = tiny_model("llama", seed=11, initializer_range=0.2), prompt_of(), LAWS[law]
    expected = [sampled(target, prompt, seed, **law) for seed in (5, 6)]
    assert expected[0][0] != expected[1][0]
    for seed, plain in zip((5, 6), expected):
        for name, drafter in drafters_of(torch.tensor(plain[0])).items():
            drafter.generation_config.drafting_mode = mode
            drafter.generation_config.on_draft_error = "raise"
            with ForwardCounter(target) as forwards:
                assert sampled(target, prompt, seed, drafter, **law) == plain, name
            assert forwards.count == drafter.last_generation_stats.num_rounds
            if name == "oracle" and mode != "auto":
                assert forwards.count == {"sync": 6, "async": 7}[mode]


def test_what_is_drawn_for_all_nodes_together_is_what_plain_generate_draws(monkeypatch):
    """As on a GPU: noise is drawn ahead, and the generator left where the accepted tokens' draws leave it."""
    make, num_rows = Walk.__init__, []

    def as_on_a_gpu(self, call):
        make(self, call)
        self._draws_together = True

    draw_together = Walk._draw_together
    monkeypatch.setattr(Walk, "__init__", as_on_a_gpu)
    monkeypatch.setattr(
        Walk, "_draw_together", lambda self, *args: num_rows.append(len(args[1])) or draw_together(self, *args)
    )
    target, prompt, law = tiny_model("llama", seed=11, initializer_range=0.2), prompt_of(), LAWS["top_k"]
    plain = sampled(target, prompt, 5, **law)
    for name, drafter in drafters_of(torch.tensor(plain[0])).items():
        assert sampled(target, prompt, 5, drafter, **law) == plain, name
    assert max(num_rows) == 6 and min(num_rows) == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_greedy_generation_draws_nothing(mode):
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    drafter.generation_config.drafting_mode = mode
    state = torch.get_rng_state()
    generate(target, prompt, drafter)
    assert drafter.last_generation_stats.num_drafted > 0 and torch.equal(torch.get_rng_state(), state)


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
