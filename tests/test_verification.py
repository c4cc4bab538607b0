"""The verification maths: laws, draws and cuts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation.utils import _speculative_sampling

from d3d_hf.model.token_chooser import TokenChooser, warpers_of
from d3d_hf.model.verification import (
    draw,
    fit_vocabulary,
    length_before_stop,
    length_through_eos,
    one_hot_law,
)


tokens = st.lists(st.integers(0, 5), max_size=8).map(lambda ids: torch.tensor(ids, dtype=torch.long))


@given(tokens, st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_the_draft_ends_with_its_first_eos(draft, eos):
    length = length_through_eos(draft, torch.tensor(eos))
    ends = [i for i, token in enumerate(draft.tolist()) if token in eos]
    assert length == (ends[0] + 1 if ends else len(draft))
    assert length_through_eos(draft, None) == len(draft)


@given(tokens, tokens.filter(len), st.integers(0, 5))
def test_the_draft_stops_short_of_a_stop_string(draft, text, stop):
    """The stop string here: two tokens `stop` in a row, which may begin in the text."""

    def is_stopped(ids):
        return ids.shape[1] >= 2 and ids[0, -2:].tolist() == [stop, stop]

    length = length_before_stop(text[None], draft, is_stopped)
    whole = text.tolist() + draft.tolist()
    completing = [i for i in range(len(text), len(whole)) if whole[i - 1 : i + 1] == [stop, stop]]
    assert length == (completing[0] - len(text) if completing else len(draft))


def test_fit_vocabulary_pads_cuts_and_forbids():
    logits = torch.arange(10.0, dtype=torch.bfloat16).reshape(2, 5)
    wide, narrow = fit_vocabulary(logits, 7), fit_vocabulary(logits, 3, never_drafted=[1, 9])
    assert wide.dtype == torch.float32 and wide.shape == (2, 7)
    assert torch.isneginf(wide[:, 5:]).all() and torch.equal(wide[:, :5], logits.float())
    assert narrow.tolist() == [[0.0, float("-inf"), 2.0], [5.0, float("-inf"), 7.0]]
    same = logits.float()
    fit_vocabulary(same, 5, never_drafted=[0])
    assert torch.isfinite(same).all(), "the caller's logits are left alone"


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(2, 6))
def test_tokens_of_probability_zero_are_never_drawn(seed, rows, vocab_size):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab_size, generator=generator)
    logits[torch.rand(rows, vocab_size, generator=generator) < 0.5] = float("-inf")
    logits[:, 0] = -30.0
    drawn = torch.stack([draw(logits, generator) for _ in range(20)], dim=1)
    assert torch.isfinite(logits.gather(1, drawn)).all()


def test_the_chooser_hands_over_the_law_that_it_drew_from():
    config = GenerationConfig(temperature=0.5, top_k=4, top_p=0.9, min_p=0.01)
    logits = torch.randn(1, 9)
    chooser = TokenChooser(9, warpers=warpers_of(config))
    draws = 4000
    drawn, law = chooser.choose(logits.expand(draws, -1))
    assert torch.equal(law, law[:1].expand_as(law))
    probs = law[0].softmax(-1)
    counts = torch.bincount(drawn, minlength=9)
    assert not counts[probs == 0].any() and (probs > 0).sum() <= 4
    kept = probs > 0
    chi_square = ((counts[kept] - draws * probs[kept]) ** 2 / (draws * probs[kept])).sum()
    assert chi_square < 21.1, "p > 1e-4 on at most 3 degrees of freedom"


def test_greedy_choices_consume_no_random_numbers_and_hand_over_no_law():
    state = torch.random.get_rng_state()
    chosen, law = TokenChooser(9, never_drafted=(8,)).choose(torch.arange(9.0).expand(2, -1))
    assert chosen.tolist() == [7, 7] and law is None
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_choosers_draws_depend_on_the_seed_alone():
    def drawn(num_between):
        torch.manual_seed(3)
        chooser = TokenChooser(50, warpers=[])
        first, _ = chooser.choose(torch.zeros(4, 50))
        torch.rand(num_between)  # others use the global generator in between
        second, _ = chooser.choose(torch.zeros(4, 50))
        return first.tolist() + second.tolist()

    assert drawn(0) == drawn(17)


def test_the_verifier_stays_finite_on_equal_one_hot_and_masked_laws():
    """What transformers computes from the laws we hand over: p == q, one-hot rows, -inf entries."""
    p = torch.randn(1, 4, 6)
    p[..., 5] = float("-inf")
    same = p[:, :3].clone()
    draft = draw(same[0])[None]
    for law in (same, one_hot_law(draft[0], 6)[None]):
        for seed in range(50):
            torch.manual_seed(seed)
            emitted, num_matches = _speculative_sampling(torch.cat([torch.tensor([[0]]), draft], 1), law, 3, p)
            assert emitted.shape[1] == num_matches + 1
            assert (emitted >= 0).all() and (emitted < 5).all()
