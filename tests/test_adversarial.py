"""Odd backbones, odd targets, odd numbers and odd surroundings: found by trying to break things."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    FalconConfig,
    Gemma3nTextConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    OPTConfig,
    Phi3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model.backbones import decoder_layers, max_draft_positions, refuse_unpackable
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import ForwardCounter, anti_oracle_drafter, oracle_drafter, tiny_config, tiny_model
from lossless import BLOCK_SIZE, assert_same, generate, prompt_of


PHI3_FORGETS = Version(transformers.__version__) < Version("5.23")

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def model_of(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def small_drafter(**kwargs):
    return D3DDrafterForCausalLM.from_backbone(tiny_model("qwen3", seed=5), **{"block_size": BLOCK_SIZE, **kwargs})


# Backbones


@pytest.mark.parametrize(
    "config",
    [
        FalconConfig(**SIZES, alibi=False),  # head_dim is derived
        FalconConfig(**SIZES, alibi=False, new_decoder_architecture=True, num_kv_heads=2),
        ModernBertDecoderConfig(**SIZES, local_attention=8, cls_token_id=1, sep_token_id=2),  # takes no None for ids
    ],
    ids=lambda config: config.model_type,
)
@torch.no_grad()
def test_configs_with_their_own_rules_are_packed(config):
    model = model_of(config)
    drafter = D3DDrafterForCausalLM.from_backbone(model)
    ids = torch.randint(2, 67, (1, 30))
    branch = torch.randint(2, 67, (1, 4))
    layout = lay_out(30, torch.tensor([[19]]), (4,), num_visible=torch.tensor([[4]]))
    packed = drafter.packed_forward(torch.cat([ids, branch], dim=1), layout).logits
    torch.testing.assert_close(packed[:, :30], model(ids).logits, atol=1e-4, rtol=1e-4)
    alone = model(torch.cat([ids[:, :20], branch], dim=1)).logits[:, -4:]
    torch.testing.assert_close(packed[:, 30:], alone, atol=1e-4, rtol=1e-4)


def test_a_backbone_whose_head_cannot_run_alone_is_refused():
    sizes = {name: value for name, value in SIZES.items() if name not in ("intermediate_size", "initializer_range")}
    model = model_of(OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64))
    with pytest.raises(ValueError, match="'opt' cannot be the backbone.*head of OPTForCausalLM cannot be run apart"):
        D3DDrafterForCausalLM.from_backbone(model)


def test_layers_that_share_a_table_cannot_be_left_out():
    config = Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=8,
        vocab_size_per_layer_input=67,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    with pytest.raises(ValueError, match="hidden_size_per_layer_input=8.*kept_layers=None"):
        decoder_layers(model_of(config))


def test_rope_settings_below_layer_types_count():
    config = tiny_config("gemma3")
    config.rope_parameters = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 48, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert max_draft_positions(config) == 48
    config.rope_parameters["full_attention"]["mrope_section"] = [1, 1, 2]
    with pytest.raises(ValueError, match="M-RoPE"):
        refuse_unpackable(config)


def test_a_backbone_is_tried_whatever_the_default_dtype_and_device():
    model = tiny_model("qwen3", seed=5)
    torch.set_default_dtype(torch.float64)
    try:
        assert D3DDrafterForCausalLM.from_backbone(model).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


# Targets


class PositionalTarget(type(tiny_model("llama"))):
    """Hands the arguments of assisted decoding on by position."""

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return super()._assisted_decoding(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)


def test_arguments_given_by_position():
    target = PositionalTarget(tiny_config("llama")).eval()
    reference = generate(target, prompt_of())
    assert_same(target, prompt_of(), oracle_drafter(reference, block_size=BLOCK_SIZE), num_forwards=6)
    batch = torch.cat([prompt_of(), prompt_of(seed=1)])
    drafter = small_drafter()
    assert torch.equal(generate(target, batch, drafter), generate(target, batch))
    assert drafter.last_generation_stats.door == "plain" and "batch size" in drafter.last_generation_stats.door_reason


def rope_target(kind):
    sizes = {**SIZES, "num_key_value_heads": 2, "eos_token_id": None}
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        return model_of(LlamaConfig(**sizes, max_position_embeddings=24, rope_parameters=rope))
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [4.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 24,
    }
    config = Phi3Config(
        **sizes, max_position_embeddings=128, original_max_position_embeddings=24, rope_parameters=rope
    )
    config.sliding_window = None
    return model_of(config)


@pytest.mark.parametrize("make_drafter", [oracle_drafter, anti_oracle_drafter])
@pytest.mark.parametrize(("kind", "num_forwards"), [("longrope", 7), ("dynamic", 28)])
def test_targets_whose_rope_goes_by_length(kind, num_forwards, make_drafter, caplog):
    if kind == "longrope" and PHI3_FORGETS:
        pytest.skip("beyond its original length, this release's Phi-3 forgets the text at every plain step")
    target, prompt = rope_target(kind), prompt_of(18)
    reference = generate(target, prompt, max_new_tokens=33)
    drafter = make_drafter(reference, block_size=BLOCK_SIZE)
    with ForwardCounter(target) as forwards:
        output = generate(target, prompt, drafter, max_new_tokens=33)
    assert output.tolist() == reference.tolist()
    assert forwards.count == (num_forwards if make_drafter is oracle_drafter else 33)
    assert ("dynamic RoPE changes" in caplog.text) == (kind == "dynamic")


# Numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("rows", [slice(None), slice(7, 8)])
def test_a_drafter_with_broken_logits_costs_drafts_only(value, rows):
    target, drafter = tiny_model("llama", seed=11), small_drafter()
    with torch.no_grad():
        drafter.lm_head.weight[rows] = value
    reference = generate(target, prompt_of())
    assert torch.equal(generate(target, prompt_of(), drafter), reference)
    for num_steps in (1, 3):
        drafter.generation_config.num_denoising_steps = num_steps
        assert torch.equal(generate(target, prompt_of(), drafter, do_sample=True, top_k=1), reference)
        outputs = []
        for assistant in (None, drafter):
            torch.manual_seed(3)
            outputs.append(generate(target, prompt_of(), assistant, do_sample=True).tolist())
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_that_the_drafter_has_no_embedding_for(do_sample, num_steps):
    target = tiny_model("llama", seed=11)
    backbone = tiny_model("qwen3", seed=2, vocab_size=40)
    drafter = D3DDrafterForCausalLM.from_backbone(backbone, block_size=BLOCK_SIZE, vocab_size=67)
    drafter.generation_config.num_denoising_steps = num_steps
    prompt = torch.tensor([[5, 50, 66, 3]])
    reference = generate(target, prompt)
    assert (reference[0, 4:] >= 40).any()
    assert torch.equal(generate(target, prompt, drafter, do_sample=do_sample, top_k=1), reference)
    assert drafter.last_generation_stats.num_drafted > 33


def test_a_vocabulary_of_the_mask_token_alone():
    model = tiny_model("llama", seed=1, vocab_size=1, bos_token_id=None, pad_token_id=None)
    drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=4, mask_token_id=0)
    assert generate(model, torch.zeros(1, 2, dtype=torch.long), drafter, do_sample=True).tolist() == [[0] * 35]


# Surroundings


def test_the_default_device_is_not_looked_at():
    target, drafter, prompt = tiny_model("llama", seed=11), small_drafter(), prompt_of()
    reference = generate(target, prompt, eos_token_id=66)
    mask = torch.ones_like(prompt)
    with torch.device("meta"):
        output = target.generate(
            prompt, attention_mask=mask, assistant_model=drafter, max_new_tokens=33, do_sample=False, eos_token_id=66
        )
    assert torch.equal(output, reference)
    assert drafter.last_generation_stats.num_drafted > 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("holes", [[1, 0, 1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0], [0] * 9, [0] * 8 + [1]])
def test_masks_with_holes(holes, do_sample):
    target, prompt, mask = tiny_model("llama", seed=11), prompt_of(9), torch.tensor([holes])
    reference = generate(target, prompt, attention_mask=mask)
    output = generate(target, prompt, small_drafter(), attention_mask=mask, do_sample=do_sample, top_k=1)
    assert torch.equal(output, reference)
