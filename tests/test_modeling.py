"""The drafter as a model: made from a backbone, saved, loaded, trained, wrapped."""

import copy
import json
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconH1Config,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2VLConfig,
)

from d3d_hf import D3DConfig, D3DDrafterForCausalLM
from d3d_hf.model.backbones import max_draft_positions
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import ARCHITECTURES, tiny_config, tiny_model


def perturb(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def packed_logits(drafter, ids):
    layout = lay_out(ids.shape[1], torch.tensor([[ids.shape[1] - 1]]), (3,))
    with torch.no_grad():
        return drafter.packed_forward(torch.cat([ids, ids[:, :3]], dim=1), layout).logits


@pytest.fixture
def ids():
    return torch.randint(2, 67, (1, 12))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forward_is_the_backbones_own(architecture, ids):
    model = tiny_model(architecture, seed=4)
    drafter = D3DDrafterForCausalLM.from_backbone(model)
    labels = ids.clone()
    labels[:, :3] = -100
    expected, got = model(input_ids=ids, labels=labels), drafter(input_ids=ids, labels=labels)
    torch.testing.assert_close(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(drafter(input_ids=ids, logits_to_keep=2).logits, expected.logits[:, -2:])
    plain = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(drafter.generate(ids, **plain), model.generate(ids, **plain))


def test_from_backbone_copies_and_leaves_the_model_alone():
    model = tiny_model("qwen3", seed=4)
    before = copy.deepcopy(model.state_dict())
    drafter = perturb(D3DDrafterForCausalLM.from_backbone(model))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert not any(parameter.data_ptr() in pointers for parameter in drafter.parameters())
    assert set(drafter.state_dict()) == {*before, "mask_embedding.weight"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mask_token_id", [None, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_save_and_load(architecture, mask_token_id, tied, ids, tmp_path):
    model = tiny_model(architecture, seed=4, tie_word_embeddings=tied)
    drafter = D3DDrafterForCausalLM.from_backbone(
        model, block_size=5, mask_token_id=mask_token_id, block_attention="causal"
    )
    options = {"num_assistant_tokens": 3, "drafting_mode": "async", "num_bonus_guesses": 0, "draft_tree_size": 12}
    perturb(drafter)
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    drafter.save_pretrained(tmp_path)
    expected = packed_logits(drafter, ids)
    for loader in (D3DDrafterForCausalLM, AutoModelForCausalLM):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is D3DDrafterForCausalLM
        torch.testing.assert_close(packed_logits(loaded, ids), expected, atol=0, rtol=0)
        assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
        assert loaded.config.block_size == 5 and loaded.config.block_attention == "causal"
        assert {name: getattr(loaded.generation_config, name) for name in options} == options
    assert isinstance(AutoConfig.from_pretrained(tmp_path), D3DConfig)


def test_loading_honours_dtype_device_map_and_attention(ids, tmp_path):
    drafter = perturb(D3DDrafterForCausalLM.from_backbone(tiny_model("llama").to(torch.bfloat16)))
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    drafter.save_pretrained(tmp_path)
    load = D3DDrafterForCausalLM.from_pretrained
    assert load(tmp_path, dtype="auto").mask_embedding.weight.dtype == torch.bfloat16
    assert load(tmp_path, dtype=torch.float32).mask_embedding.weight.dtype == torch.float32
    mapped = load(tmp_path, dtype=torch.float32, device_map="cpu")
    eager = load(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert eager._backbone.config._attn_implementation == "eager"
    torch.testing.assert_close(packed_logits(eager, ids), packed_logits(mapped, ids), atol=1e-5, rtol=1e-5)


def test_missing_mask_embedding_is_reported_and_initialised(tmp_path, caplog):
    D3DDrafterForCausalLM.from_backbone(tiny_model("llama"), mask_token_id=5).save_pretrained(tmp_path)
    config = D3DConfig.from_pretrained(tmp_path)
    config.mask_token_id = None
    loaded, info = D3DDrafterForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert "mask_embedding" in str(info["missing_keys"])
    assert torch.isfinite(loaded.mask_embedding.weight).all()


@pytest.mark.parametrize("kept, indices", [(1, [0]), (2, [0, 3]), (3, [0, 2, 3]), ([1, 2], [1, 2])])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kept_layers(architecture, kept, indices, ids, tmp_path):
    model = tiny_model(architecture, seed=4, num_layers=4)
    drafter = D3DDrafterForCausalLM.from_backbone(model, kept_layers=kept)
    assert drafter.config.kept_layers == indices
    for layer, i in zip(drafter.model.layers, indices, strict=True):
        for name, tensor in model.model.layers[i].state_dict().items():
            assert torch.equal(layer.state_dict()[name], tensor)
    if architecture == "gemma3":
        expected = [model.config.layer_types[i] for i in indices]
        assert drafter.config.backbone_config.layer_types == expected
    drafter.save_pretrained(tmp_path)
    loaded = D3DDrafterForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(packed_logits(loaded, ids), packed_logits(drafter, ids))


def test_kept_layers_of_a_moe_with_dense_layers():
    model = tiny_model("qwen3_moe", num_layers=4, mlp_only_layers=[3], decoder_sparse_step=2)
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    drafter = D3DDrafterForCausalLM.from_backbone(model, kept_layers=[1, 2, 3])
    assert [type(layer.mlp).__name__ for layer in drafter.model.layers] == kinds[1:]


def test_a_learned_position_backbone_works(ids):
    config = GPT2Config(
        vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=1, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=4)
    reference = model.generate(ids, max_new_tokens=27, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=27, do_sample=False, assistant_model=drafter), reference)
    assert drafter.last_generation_stats.tokens_per_round > 1.5


def test_gradients_reach_backbone_and_mask_with_and_without_checkpointing(ids):
    drafter = perturb(D3DDrafterForCausalLM.from_backbone(tiny_model("qwen3"))).train()
    layout = lay_out(12, torch.tensor([[5, 11]]), (3, 3))
    tokens = torch.cat([ids, ids[:, :6]], dim=1)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # the first since 5.24
            getattr(drafter, next(name for name in enable if hasattr(drafter, name)))()
        drafter.zero_grad()
        drafter.packed_forward(tokens, layout).logits[:, -6:].square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in drafter.parameters()])
        assert all(gradient.abs().sum() > 0 for gradient in gradients[-1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_deepcopy_and_pickle_keep_the_modules_shared(ids):
    drafter = perturb(D3DDrafterForCausalLM.from_backbone(tiny_model("llama")))
    expected = packed_logits(drafter, ids)
    for twin in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        torch.testing.assert_close(packed_logits(twin, ids), expected)
        perturb(twin)
        assert not torch.allclose(packed_logits(twin, ids), expected)
        assert twin._backbone._modules is twin._modules
    torch.testing.assert_close(packed_logits(drafter, ids), expected)


def test_a_replaced_head_is_used(ids):
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("llama"))
    drafter.lm_head = torch.nn.Linear(32, 67, bias=False)
    torch.nn.init.zeros_(drafter.lm_head.weight)
    assert not packed_logits(drafter, ids).any()


def test_lora_trains_and_drafts(ids):
    target = tiny_model("llama", seed=4)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    wrapped = get_peft_model(drafter, lora).eval()
    wrapped(input_ids=ids, labels=ids).loss.backward()
    assert sum(parameter.grad is not None for parameter in wrapped.parameters()) > 0
    reference = target.generate(ids, max_new_tokens=20, do_sample=False)
    output = target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=wrapped)
    assert torch.equal(output, reference)
    assert wrapped.last_generation_stats.num_drafted > 0


@pytest.mark.parametrize(
    "config, reason",
    [
        (BloomConfig(vocab_size=67, hidden_size=32, n_layer=2, n_head=4), "ALiBi"),
        (FalconH1Config(vocab_size=67), "falcon_h1"),
        (tiny_config("llama", layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (
            tiny_config(
                "llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            ),
            "M-RoPE",
        ),
        (Qwen2VLConfig(), "qwen2_vl"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(config, reason):
    with pytest.raises(ValueError, match=reason):
        D3DDrafterForCausalLM(D3DConfig(config, vocab_size=67))


def test_from_backbone_refuses_what_cannot_be_packed():
    with pytest.raises(ValueError, match="'bloom'.*ALiBi"):
        D3DDrafterForCausalLM.from_backbone(BloomForCausalLM(BloomConfig(vocab_size=67, hidden_size=32, n_layer=2)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 2.5}, "block_size is 2.5"),
        ({"mask_token_id": 67}, "mask_token_id is 67.*67 embedding rows"),
        ({"block_attention": "both"}, "block_attention is 'both'.*causal"),
        ({"kept_layers": 0}, "kept_layers is 0: keep between 1 and 2"),
        ({"kept_layers": [1, 0]}, r"kept_layers is \[1, 0\]"),
        ({"kept_layers": [0, 2]}, "from 0 to 1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"dtype": "auto"}, "only with a model's name"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        D3DDrafterForCausalLM.from_backbone(tiny_model("llama"), **arguments)


def test_a_target_with_flash_attention_gives_a_drafter_with_sdpa():
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    drafter = D3DDrafterForCausalLM.from_backbone(model)
    assert drafter.config.backbone_config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "flash_attention_2"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"backbone_config": None}, "no 'backbone_config'"),
        ({"backbone_config": {"model_type": "unknown"}}, "model_type 'unknown'"),
        ({"backbone_config": {"vocab_size": 67}}, "model_type None"),
        ({"backbone_config": "qwen3"}, "backbone_config is 'qwen3'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"mask_token_id": "5"}, "mask_token_id is '5'"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"kept_layers": "x"}, "kept_layers is 'x'"),
    ],
)
def test_damaged_configs_are_refused(fields, message, tmp_path):
    D3DDrafterForCausalLM.from_backbone(tiny_model("llama")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        D3DDrafterForCausalLM.from_pretrained(tmp_path)


def test_the_callers_config_is_left_alone():
    config = tiny_config("llama")
    D3DDrafterForCausalLM._from_config(D3DConfig(config), dtype=torch.bfloat16, attn_implementation="eager")
    assert config._attn_implementation is None and config.dtype is None


def test_adapters_and_drafters_are_refused_as_backbones():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="merge_and_unload"):
        D3DDrafterForCausalLM.from_backbone(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    with pytest.raises(ValueError, match="already"):
        D3DDrafterForCausalLM.from_backbone(D3DDrafterForCausalLM.from_backbone(tiny_model("llama")))


def test_models_without_their_weights_are_refused():
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM is quantised or keeps weights elsewhere.*load it in full"):
        D3DDrafterForCausalLM.from_backbone(model)


def test_rescaling_rope_reaches_its_original_length_only():
    assert max_draft_positions(tiny_config("llama", max_position_embeddings=64)) == 64
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    assert max_draft_positions(tiny_config("llama", max_position_embeddings=64, rope_parameters=rope)) == 16
