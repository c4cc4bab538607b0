"""The packed layout against its definition, and packed logits against unpacked ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model.packing import CONTEXT, PADDING, attention_masks, lay_out, layer_windows, visibility_rule
from d3d_hf.testing import ARCHITECTURES, tiny_config, tiny_model


@st.composite
def passes(draw):
    """A packed pass: (context_length, num_cached, branches as (anchor, num_slots, num_visible), bidirectional)."""
    num_cached = draw(st.integers(0, 12))
    context_length = draw(st.integers(0 if num_cached else 1, 10))
    branch = st.tuples(st.integers(0, num_cached + context_length - 1), st.integers(1, 5), st.integers(0, 5)).map(
        lambda b: (b[0], b[1], min(b[1], b[2]))
    )
    return context_length, num_cached, draw(st.lists(branch, max_size=5)), draw(st.booleans())


def lay_out_branches(context_length, num_cached, branches, bidirectional):
    if not branches:
        return lay_out(context_length, num_cached=num_cached, bidirectional=bidirectional)
    anchors, num_slots, num_visible = zip(*branches, strict=True)
    return lay_out(
        context_length,
        torch.tensor([anchors]),
        num_slots,
        num_visible=torch.tensor([num_visible]),
        num_cached=num_cached,
        bidirectional=bidirectional,
    )


def described_tokens(context_length, num_cached, branches):
    """Every key, the cached ones first, in the words of the definition: (kind, position, branch, anchor)."""
    tokens = [("context", position, None, None) for position in range(num_cached + context_length)]
    for number, (anchor, num_slots, num_visible) in enumerate(branches):
        for slot in range(num_slots):
            tokens.append(("visible" if slot < num_visible else "mask", anchor + 1 + slot, number, anchor))
    return tokens


def is_visible_by_definition(query, key, bidirectional, window):
    query_kind, query_position, query_branch, query_anchor = query
    key_kind, key_position, key_branch, _ = key
    if window is not None and query_position - key_position >= window:
        return False
    if query_kind == "context":
        return key_kind == "context" and key_position <= query_position
    if key_kind == "context":
        return key_position <= query_anchor
    if key_branch != query_branch:
        return False
    if query_kind == "visible":
        return key_kind == "visible" and key_position <= query_position
    return key_kind == "visible" or bidirectional or key_position <= query_position


@settings(max_examples=150, deadline=None)
@given(passes(), st.sampled_from([None, 1, 3, 8]))
def test_visibility_is_the_definition(packed, window):
    context_length, num_cached, branches, bidirectional = packed
    layout = lay_out_branches(*packed)
    tokens = described_tokens(context_length, num_cached, branches)
    queries = tokens[num_cached:]
    rule = visibility_rule(layout, window)
    got = rule(torch.tensor(0), None, torch.arange(len(queries))[:, None], torch.arange(len(tokens))[None, :])
    expected = [[is_visible_by_definition(query, key, bidirectional, window) for key in tokens] for query in queries]
    assert got.tolist() == expected
    assert layout.position_ids[0].tolist() == [token[1] for token in queries]
    assert layout.is_mask_slot[0].tolist() == [token[0] == "mask" for token in queries]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_seen_by_nobody_and_takes_no_position(side):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    if side == "right":
        mask = mask.flip(1)
    anchors = torch.tensor([[2, -1], [4, 1]])
    layout = lay_out(5, anchors, (2, 2), context_mask=mask)
    is_token = mask[0].bool()
    assert layout.position_ids[0, :5][is_token].tolist() == [0, 1, 2]
    assert (layout.branch_ids[0, :5] == CONTEXT).tolist() == is_token.tolist()
    assert layout.branch_ids[0, 5:].tolist() == [1, 1, PADDING, PADDING]
    seen = visibility_rule(layout)(torch.tensor(0), None, torch.arange(9)[:, None], torch.arange(9)[None, :])
    padding = layout.branch_ids[0] == PADDING
    assert not seen[~padding][:, padding].any()
    assert seen.diagonal().all(), "every token sees itself, so that no softmax runs over nothing"


@torch.no_grad()
def alone_logits(drafter, ids, anchor, slots, num_visible, bidirectional):
    """The reference: one branch after its own context, nothing cached, nothing else in the pass, the mask by hand."""
    num_slots = len(slots)
    length = anchor + 1 + num_slots
    positions = torch.arange(length)
    allowed = positions[:, None] >= positions[None, :]
    if bidirectional:
        allowed[anchor + 1 + num_visible :, anchor + 1 + num_visible :] = True
    embeds = drafter.get_input_embeddings()(torch.tensor([ids[: anchor + 1] + slots]))
    embeds[0, anchor + 1 + num_visible :] = drafter._mask_vector(embeds)
    config = drafter.config.backbone_config

    def mask(window):
        seen = allowed if window is None else allowed & (positions[:, None] - positions[None, :] < window)
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]

    masks = {kind: mask(window) for kind, window in layer_windows(config).items()}
    masks = masks if len(masks) > 1 else next(iter(masks.values()))
    return drafter(inputs_embeds=embeds, attention_mask=masks, position_ids=positions[None]).logits[0, anchor + 1 :]


@pytest.mark.parametrize("mask_token_id", [None, 5])
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logits_equal_unpacked_ones(architecture, attn_implementation, mask_token_id):
    model = tiny_model(architecture, seed=1, attn_implementation=attn_implementation, initializer_range=0.2)
    drafter = D3DDrafterForCausalLM.from_backbone(model, mask_token_id=mask_token_id)

    @settings(max_examples=12, deadline=None)
    @given(passes(), st.integers(0, 2**31))
    def check(packed, seed):
        context_length, num_cached, branches, bidirectional = packed
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, 67, (num_cached + context_length,), generator=generator).tolist()
        slots = [torch.randint(2, 67, (num_slots,), generator=generator).tolist() for _, num_slots, _ in branches]
        layout = lay_out_branches(*packed)
        cache = DynamicCache()
        with torch.no_grad():
            if num_cached:
                drafter.packed_forward(torch.tensor([ids[:num_cached]]), lay_out(num_cached), cache=cache)
            flat = torch.tensor([ids[num_cached:] + [token for branch in slots for token in branch]])
            if layout.num_tokens == 0:
                return
            logits = drafter.packed_forward(flat, layout, cache=cache).logits[0]
            context = drafter(input_ids=torch.tensor([ids])).logits[0, num_cached:]
        torch.testing.assert_close(logits[:context_length], context, atol=1e-5, rtol=1e-5)
        first = context_length
        for (anchor, num_slots, num_visible), tokens in zip(branches, slots, strict=True):
            expected = alone_logits(drafter, ids, anchor, tokens, num_visible, bidirectional)
            torch.testing.assert_close(logits[first : first + num_slots], expected, atol=1e-5, rtol=1e-5)
            first += num_slots

    check()


def test_a_batch_with_padding_equals_its_rows_alone():
    """The training layout: padded sequences side by side, each with its own anchors and visible tokens."""
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("gemma3", seed=2, initializer_range=0.2))
    short, long = torch.randint(2, 67, (7,)), torch.randint(2, 67, (12,))
    slots = torch.randint(2, 67, (2, 6))
    context = torch.stack([torch.cat([torch.zeros(5, dtype=torch.long), short]), long])
    mask = torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
    anchors, num_visible = torch.tensor([[2, 6], [11, 3]]), torch.tensor([[0, 1], [2, 0]])
    layout = lay_out(12, anchors, (3, 3), num_visible=num_visible, context_mask=mask)
    with torch.no_grad():
        packed = drafter.packed_forward(torch.cat([context, slots], dim=1), layout).logits
    for row, ids in enumerate((short, long)):
        for branch in range(2):
            first = 12 + 3 * branch
            tokens = slots[row, 3 * branch : 3 * branch + 3].tolist()
            anchor, visible = int(anchors[row, branch]), int(num_visible[row, branch])
            expected = alone_logits(drafter, ids.tolist(), anchor, tokens, visible, True)
            torch.testing.assert_close(packed[row, first : first + 3], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # compiles the attention: half a minute
def test_flex_attention_gives_the_same_logits():
    model = tiny_model("llama", seed=1)
    drafter = D3DDrafterForCausalLM.from_backbone(model)
    layout = lay_out(9, torch.tensor([[4, 8]]), (3, 4))
    ids = torch.randint(2, 67, (1, 16))
    with torch.no_grad():
        expected = drafter.packed_forward(ids, layout).logits
        drafter.set_attn_implementation("flex_attention")
        got = drafter.packed_forward(ids, layout).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_mixed_windows_need_one_mask_per_layer_type():
    layout = lay_out(20, torch.tensor([[19]]), (3,))
    config = tiny_config("gemma3")
    config._attn_implementation = "sdpa"
    masks = attention_masks(layout, config, torch.float32)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert masks["full_attention"].sum() > masks["sliding_attention"].sum()


def test_a_plain_causal_pass_leaves_the_mask_to_the_backbone():
    config = tiny_config("llama")
    assert attention_masks(lay_out(5), config, torch.float32) is None


def test_errors_name_the_value_and_the_mend():
    with pytest.raises(ValueError, match="names 1 branches, anchors has 2"):
        lay_out(5, torch.tensor([[1, 2]]), (3,))
    config = tiny_config("llama")
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2'.*attn_implementation='sdpa'"):
        attention_masks(lay_out(5, torch.tensor([[1]]), (3,)), config, torch.float32)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        layer_windows(config)
