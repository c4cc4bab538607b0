"""Greedy generation with a drafter gives the ids of plain generate, exactly, in the target forwards it should take."""

import pytest
import torch
from transformers import GenerationConfig

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.testing import (
    ARCHITECTURES,
    ForwardCounter,
    acceptance_profile_drafter,
    anti_oracle_drafter,
    noisy_oracle_drafter,
    oracle_drafter,
    tiny_model,
)
from lossless import assert_same, generate, prompt_of


def other_architecture(architecture):
    return ARCHITECTURES[(ARCHITECTURES.index(architecture) + 1) % len(ARCHITECTURES)]


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("prompt_length", [1, 5, 30])
class TestEveryArchitecture:
    """33 new tokens, block size 5, a drafter of another architecture than the target's."""

    @pytest.fixture
    def case(self, architecture, attn_implementation, prompt_length):
        target = tiny_model(architecture, seed=prompt_length, attn_implementation=attn_implementation)
        prompt = prompt_of(prompt_length, seed=prompt_length)
        return target, prompt, generate(target, prompt), {"architecture": other_architecture(architecture)}

    def test_an_oracle_is_accepted_whole(self, case):
        target, prompt, reference, kwargs = case
        # six tokens a round: 33 = 5 x 6 + 3, where the last round may draft only two
        assert_same(target, prompt, oracle_drafter(reference, **kwargs), num_forwards=6)

    def test_an_anti_oracle_is_never_accepted(self, case):
        target, prompt, reference, kwargs = case
        assert_same(target, prompt, anti_oracle_drafter(reference, **kwargs), num_forwards=33)

    @pytest.mark.parametrize("wrong_slot", [1, 2, 4])
    def test_a_noisy_oracle_is_accepted_up_to_its_error(self, case, wrong_slot):
        target, prompt, reference, kwargs = case
        drafter = noisy_oracle_drafter(reference, wrong_slots=[wrong_slot], **kwargs)
        assert_same(target, prompt, drafter, num_forwards=-(-33 // (wrong_slot + 1)))

    def test_a_random_drafter_changes_nothing(self, case, architecture):
        target, prompt, _, kwargs = case
        model = tiny_model(kwargs["architecture"], seed=99, num_layers=3)
        assert_same(target, prompt, D3DDrafterForCausalLM.from_backbone(model, block_size=5))


@pytest.mark.parametrize("seed", range(30))
def test_random_acceptance(seed):
    """Rounds of every length, over random prompts, lengths, block sizes and depths."""
    generator = torch.Generator().manual_seed(seed)

    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    architecture = ARCHITECTURES[seed % 4]
    target = tiny_model(architecture, seed=seed, num_layers=pick(1, 3), initializer_range=0.5)
    prompt, length = prompt_of(pick(1, 40), seed), pick(1, 50)
    reference = generate(target, prompt, max_new_tokens=length)
    profile = torch.rand(4, generator=generator).mul(0.6).add(0.4).tolist()
    drafter = acceptance_profile_drafter(
        reference, profile, seed=seed, architecture=ARCHITECTURES[pick(0, 3)], block_size=pick(1, 9)
    )
    assert_same(target, prompt, drafter, max_new_tokens=length)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_targets_own_layers_draft_their_first_token_right(architecture):
    target = tiny_model(architecture, seed=7)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=5)
    assert_same(target, prompt_of(12), drafter)
    accepted = drafter.last_generation_stats.num_accepted
    assert sum(rounds for length, rounds in accepted.items() if length == 0) <= 1, "only where the budget ends"


@pytest.mark.parametrize("num_new_tokens", [1, 2, 4, 5, 6, 7])
@pytest.mark.parametrize("block_size", [1, 5])
def test_budgets_around_the_block_size(num_new_tokens, block_size):
    target, prompt = tiny_model("qwen3", seed=3), prompt_of(8)
    reference = generate(target, prompt, max_new_tokens=num_new_tokens)
    drafter = oracle_drafter(reference, block_size=block_size)
    num_forwards = -(-num_new_tokens // (block_size + 1))
    output = assert_same(target, prompt, drafter, num_forwards, max_new_tokens=num_new_tokens)
    assert output.shape[1] == 8 + num_new_tokens


@pytest.mark.parametrize("eos_index", range(9))
def test_eos_inside_an_accepted_block(eos_index):
    """EOS at every slot of the first block, as the first token, and as the bonus."""
    target, prompt = tiny_model("llama", seed=11), prompt_of(6)
    free = generate(target, prompt)
    eos = int(free[0, 6 + eos_index])
    if eos in free[0, 6 : 6 + eos_index].tolist():
        pytest.skip("the token comes up earlier")
    output = assert_same(target, prompt, oracle_drafter(free), eos_token_id=eos, pad_token_id=0)
    assert output.shape[1] == 6 + eos_index + 1
    assert_same(target, prompt, noisy_oracle_drafter(free, [1]), eos_token_id=[eos, 0], pad_token_id=0)


class RecordingStreamer:
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces += value.reshape(-1).tolist()

    def end(self):
        self.ended += 1


def test_a_streamer_sees_each_token_once():
    target, prompt = tiny_model("llama", seed=11), prompt_of(6)
    reference = generate(target, prompt)
    streamer = RecordingStreamer()
    generate(target, prompt, oracle_drafter(reference), streamer=streamer)
    assert streamer.pieces == reference[0].tolist() and streamer.ended == 1


def test_one_drafter_serves_many_calls_and_several_targets():
    model = tiny_model("qwen3", seed=99)
    drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=4)
    targets = [tiny_model("llama", seed=1), tiny_model("gemma3", seed=2)]
    for turn in range(6):
        assert_same(targets[turn % 2], prompt_of(5 + turn, turn), drafter, max_new_tokens=12)


def test_options_and_their_precedence():
    target, prompt = tiny_model("llama", seed=11), prompt_of(6)
    reference = generate(target, prompt, max_new_tokens=24)
    drafter = oracle_drafter(reference, block_size=7)
    config = {"max_new_tokens": 24, "do_sample": False}

    def forwards(**options):
        with ForwardCounter(target) as counter:
            output = target.generate(
                prompt, assistant_model=drafter, generation_config=GenerationConfig(**config, **options)
            )
        assert torch.equal(output, reference)
        return counter.count

    assert forwards() == 3, "block_size by default"
    assert forwards(num_assistant_tokens=3) == 6, "the call's"
    drafter.generation_config.num_assistant_tokens = 5
    assert forwards() == 4, "the drafter's"
    assert forwards(num_assistant_tokens=3) == 6, "the call's before the drafter's"
    assert forwards(num_assistant_tokens=20) == 4, "20 is what transformers fills in: not given"
    assert forwards(num_assistant_tokens=50) == 3, "never more than block_size"
    assert forwards(num_denoising_steps=3) == 4
    assert drafter.generation_config.num_assistant_tokens == 5
    for options, message in (
        ({"num_assistant_tokens": 0}, "num_assistant_tokens is 0"),
        ({"num_denoising_steps": 1.5}, "num_denoising_steps is 1.5"),
        ({"drafting_mode": "never"}, "drafting_mode is 'never': choose one of"),
    ):
        with pytest.raises(ValueError, match=message):
            forwards(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_every_id_is_the_argmax_or_a_rounding_tie(dtype):
    target, prompt = tiny_model("llama", seed=11).to(dtype), prompt_of(6)
    reference = generate(target, prompt)
    output = generate(target, prompt, acceptance_profile_drafter(reference, [0.9, 0.6]))
    with torch.no_grad():
        logits = target(output).logits[0, 5:-1].float()
    emitted = logits.gather(1, output[0, 6:, None]).squeeze(1)
    gap = logits.max(dim=1).values - emitted
    rounding = 4 * torch.finfo(dtype).eps * logits.abs().max(dim=1).values
    assert (gap <= rounding).all()
