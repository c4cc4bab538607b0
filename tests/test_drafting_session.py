"""The session's cache through everything that a caller may do between two drafts, against a fresh session."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model import drafting_session
from d3d_hf.model.block import draftable
from d3d_hf.model.drafting_session import DraftingSession
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import ARCHITECTURES, tiny_model


def session_of(drafter, **kwargs):
    return DraftingSession(drafter, 67, **kwargs)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def drafter(request):
    model = tiny_model(request.param, seed=5, initializer_range=0.2)
    return D3DDrafterForCausalLM.from_backbone(model, block_size=4)


@torch.no_grad()
def laws_by_definition(drafter, context, num_tokens):
    """One uncached pass over the whole text: the anchor's own output, then the mask slots'."""
    slots = drafter.config.block_size - 1
    layout = lay_out(len(context), torch.tensor([[len(context) - 1]]), (slots,))
    ids = torch.cat([context, torch.zeros(slots, dtype=torch.long)])[None]
    return drafter.packed_forward(ids, layout).logits[0, len(context) - 1 :][:num_tokens]


def test_every_draft_equals_an_uncached_one_whatever_the_history(drafter):
    @settings(max_examples=10, deadline=None)
    @given(
        st.integers(0, 2**31),
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(1, 4)), min_size=20, max_size=20),
    )
    def check(seed, history):
        """20 rounds; each keeps some of the text, appends other tokens and asks for a draft."""
        generator = torch.Generator().manual_seed(seed)
        session = session_of(drafter)
        text = torch.randint(2, 67, (9,), generator=generator)
        for num_kept, num_new, num_tokens in history:
            new = torch.randint(2, 67, (num_new,), generator=generator)
            # mostly append, as generate does; sometimes go back to an earlier text
            text = torch.cat([text if num_kept > 10 else text[: max(num_kept, 1)], new])
            block = session.block(text, num_tokens)
            expected = laws_by_definition(drafter, text, num_tokens)
            torch.testing.assert_close(block.logits, expected, atol=1e-5, rtol=1e-5)
            assert session.num_cached == len(text), "the cache holds the context and nothing else"
            assert session.draft(text, num_tokens).tolist() == expected.argmax(dim=-1).tolist()
            assert session.num_cached == len(text)

    check()


def test_only_new_tokens_are_fed(drafter, monkeypatch):
    fed = []
    packed_forward = drafter.packed_forward
    monkeypatch.setattr(
        drafter, "packed_forward", lambda ids, *a, **k: fed.append(ids.shape[1]) or packed_forward(ids, *a, **k)
    )
    session = session_of(drafter)
    text = torch.randint(2, 67, (30,))
    for length in (20, 21, 24, 30, 30):
        session.draft(text[:length], 4)
    slots = drafter.config.block_size - 1
    assert fed == [20 + slots, 1 + slots, 3 + slots, 6 + slots, 1 + slots]


def test_a_long_prompt_is_fed_in_pieces(drafter, monkeypatch):
    monkeypatch.setattr(drafting_session, "MAX_CONTEXT_PER_PASS", 16)
    text = torch.randint(2, 67, (70,))
    widths = []
    packed_forward = drafter.packed_forward
    monkeypatch.setattr(
        drafter, "packed_forward", lambda ids, *a, **k: widths.append(ids.shape[1]) or packed_forward(ids, *a, **k)
    )
    block = session_of(drafter).block(text, 4)
    assert widths == [16, 16, 16, 16, 6 + 3]
    torch.testing.assert_close(block.logits, laws_by_definition(drafter, text, 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_steps", [2, 3, 4])
def test_denoising_steps_fill_from_the_left(drafter, num_steps):
    """Each later step shows the tokens before it, so the last of `block_size` steps is autoregressive."""
    session = session_of(drafter, num_denoising_steps=num_steps)
    text = torch.randint(2, 67, (12,))
    draft = session.draft(text, 4)
    assert session.num_cached == 12
    shown = 0
    for steps_left in range(num_steps, 0, -1):
        take = -(-(4 - shown) // steps_left)
        layout = lay_out(12, torch.tensor([[11]]), (3,), num_visible=torch.tensor([[shown]]))
        ids = torch.cat([text, draft[:shown], torch.zeros(3 - shown, dtype=torch.long)])[None]
        with torch.no_grad():
            expected = drafter.packed_forward(ids, layout).logits[0, 11 + shown : 11 + shown + take]
        assert draft[shown : shown + take].tolist() == expected.argmax(dim=-1).tolist()
        shown += take
    assert shown == 4


def test_the_text_may_outgrow_the_drafters_positions(caplog):
    model = tiny_model("llama", max_position_embeddings=16)
    session = session_of(D3DDrafterForCausalLM.from_backbone(model, block_size=4))
    text = torch.randint(2, 67, (20,))
    assert len(session.draft(text[:13], 4)) == 4
    assert len(session.draft(text[:14], 4)) == 0
    assert len(session.draft(text[:15], 4)) == 0
    assert caplog.text.count("positions, which end at 16") == 1


def test_a_failed_pass_leaves_a_session_that_works(drafter, monkeypatch):
    text = torch.randint(2, 67, (12,))
    session = session_of(drafter)
    session.draft(text[:8], 4)
    layer = drafter.model.layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.draft(text, 4)
    block = session.block(text, 4)
    torch.testing.assert_close(block.logits, laws_by_definition(drafter, text, 4), atol=1e-5, rtol=1e-5)


def test_close_frees_the_cache_and_can_be_repeated(drafter):
    session = session_of(drafter)
    session.draft(torch.randint(2, 67, (12,)), 4)
    session.close()
    session.close()
    assert session.num_cached == 0
    assert len(session.draft(torch.randint(2, 67, (3,)), 2)) == 2


def test_what_may_be_drafted():
    """Ids beyond the target's vocabulary are left out, the mask token gets -inf, the caller's logits stay."""
    logits = torch.arange(10.0, dtype=torch.bfloat16).reshape(2, 5)
    wide, narrow = draftable(logits, 7), draftable(logits, 3, never_drafted=[1, 9])
    assert torch.equal(wide, logits), "fewer rows than the target has tokens: those are drafted"
    assert narrow.tolist() == [[0.0, float("-inf"), 2.0], [5.0, float("-inf"), 7.0]]
    assert torch.isfinite(logits).all()
