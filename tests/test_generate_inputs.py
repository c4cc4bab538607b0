"""What a call of generate may be given: masks, positions, earlier caches, embeddings, any length of prompt."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model.backbones import cache_argument
from d3d_hf.testing import ARCHITECTURES, ForwardCounter, oracle_drafter, tiny_config, tiny_model
from lossless import BLOCK_SIZE, assert_same, assert_same_for_every_drafter, drafters_of, generate, prompt_of


@pytest.fixture(params=ARCHITECTURES)
def target(request):
    return tiny_model(request.param, seed=11)


def left_padded(prompt, padding):
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt], dim=1)
    return ids, (torch.arange(ids.shape[1]) >= padding).long()[None]


def test_attention_mask_omitted_and_all_ones(target):
    prompt = prompt_of()
    assert_same_for_every_drafter(target, prompt, attention_mask=None)
    assert_same_for_every_drafter(target, prompt, attention_mask=torch.ones_like(prompt))


@pytest.mark.parametrize("padding", [1, 7])
def test_left_padding(target, padding):
    ids, mask = left_padded(prompt_of(), padding)
    assert_same_for_every_drafter(target, ids, padding=padding, attention_mask=mask)


def test_padding_is_not_drafted_for():
    """The drafter's own text is the unpadded one: with the target's layers its first token is always right."""
    target = tiny_model("llama", seed=11)
    ids, mask = left_padded(prompt_of(), 5)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    assert_same(target, ids, drafter, attention_mask=mask)
    accepted = drafter.last_generation_stats.num_accepted
    assert sum(rounds for length, rounds in accepted.items() if length == 0) <= 1


def test_position_ids_given(target):
    prompt = prompt_of()
    positions = torch.arange(prompt.shape[1])[None]
    assert_same_for_every_drafter(target, prompt, position_ids=positions)


def test_prompts_of_one_token(target):
    assert_same_for_every_drafter(target, prompt_of(1))


def test_a_prompt_of_4000_tokens():
    target = tiny_model("gemma3", seed=11, max_position_embeddings=8192)
    prompt = prompt_of(4000)
    reference = generate(target, prompt, max_new_tokens=14)
    for architecture in ("llama", "gemma3"):
        drafter = oracle_drafter(reference, block_size=BLOCK_SIZE, architecture=architecture)
        drafter.config.backbone_config.max_position_embeddings = 8192
        assert_same(target, prompt, drafter, num_forwards=3, reference=reference, max_new_tokens=14)


def test_a_text_that_outgrows_the_drafters_positions(caplog):
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    reference = generate(target, prompt)
    drafter = oracle_drafter(reference, block_size=BLOCK_SIZE)
    drafter.config.backbone_config.max_position_embeddings = 24
    # Drafting from 6, 12 and 18 tokens on; plain from 24.
    assert_same(target, prompt, drafter, num_forwards=3 + 15, reference=reference)
    assert caplog.text.count("positions, which end at 24") == 1


def test_extra_model_arguments(target):
    prompt = prompt_of()
    assert_same_for_every_drafter(target, prompt, use_cache=True, output_attentions=False)


@pytest.mark.parametrize("kept_by_caller", [True, False])
def test_a_cache_continued_from_an_earlier_turn(target, kept_by_caller, caplog):
    """The whole text is passed with the cache of a part of it: only what it lacks is read, and it goes on."""
    first, key = prompt_of(20), cache_argument(target)

    def second_turn(drafter, assistant_of_first_turn=None):
        cache = DynamicCache() if kept_by_caller else DynamicCache(config=target.config)
        answer = generate(target, first, assistant_of_first_turn, max_new_tokens=6, **{key: cache})
        text = torch.cat([answer, prompt_of(4, seed=1)], dim=1)
        fed = []
        forward = target.forward

        @functools.wraps(forward)
        def counting(input_ids=None, **kwargs):
            fed.append(input_ids.shape[1])
            return forward(input_ids=input_ids, **kwargs)

        target.forward = counting
        try:
            return generate(target, text, drafter, **{key: cache}), cache, fed, text
        finally:
            target.forward = forward

    reference, plain_cache, plain_fed, text = second_turn(None)
    assert text.shape[1] == 30 and plain_fed[0] == 5
    for name, drafter in drafters_of(reference).items():
        for earlier in (None, drafter):
            output, cache, fed, _ = second_turn(drafter, earlier)
            assert torch.equal(output, reference), name
            assert cache.get_seq_length() == output.shape[1] - 1 == plain_cache.get_seq_length()
            for ours, theirs in zip(cache.layers, plain_cache.layers, strict=True):
                torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)
            if name == "oracle":
                assert fed == [5 + 5, 6, 6, 6, 6, 3], "the text is not fed again"
            assert drafter.last_generation_stats.num_rounds == len(fed)
    assert not caplog.records


def test_a_cache_whose_text_is_not_passed_again_runs_plain(caplog):
    target, first = tiny_model("llama", seed=11), prompt_of(20)
    key = cache_argument(target)

    def second_turn(drafter):
        cache = DynamicCache()
        answer = generate(target, first, max_new_tokens=6, **{key: cache})
        new = torch.cat([answer[:, -1:], prompt_of(4, seed=1)], dim=1)
        mask = torch.ones(1, cache.get_seq_length() + new.shape[1], dtype=torch.long)
        return target.generate(
            new, attention_mask=mask, max_new_tokens=9, do_sample=False, assistant_model=drafter, **{key: cache}
        )

    drafter = oracle_drafter(first)
    assert torch.equal(second_turn(drafter), second_turn(None))
    assert caplog.text.count("pass the whole text") == 1
    assert drafter.last_generation_stats.door == "plain"


def test_inputs_embeds_are_refused_before_any_work():
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    drafter = oracle_drafter(prompt)
    with ForwardCounter(target) as forwards:
        for ids in ({}, {"input_ids": prompt}):
            with pytest.raises(ValueError, match="inputs_embeds was given.*pass input_ids"):
                target.generate(
                    inputs_embeds=target.get_input_embeddings()(prompt),
                    max_new_tokens=5,
                    assistant_model=drafter,
                    **ids,
                )
    assert forwards.count == 0


def test_a_multimodal_target_given_text_alone():
    text = tiny_config("gemma3", vocab_size=67)
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=65, boi_token_index=66,
        eoi_token_index=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        target = Gemma3ForConditionalGeneration(config).eval()
    target.generation_config.eos_token_id = None
    prompt = torch.randint(2, 60, (1, 9))
    assert_same_for_every_drafter(target, prompt)


def test_a_model_loaded_by_auto_class_from_a_folder(tmp_path):
    tiny_model("qwen3", seed=11).save_pretrained(tmp_path)
    assert_same_for_every_drafter(AutoModelForCausalLM.from_pretrained(tmp_path), prompt_of())
