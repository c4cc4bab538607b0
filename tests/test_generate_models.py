"""Targets and drafters in every form that users have them: adapters, compiled, other dtypes, quantised, offloaded."""

import copy
import importlib.util
import sys

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    pipeline,
)

import d3d_hf
from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.decoding.target_pass import TargetPasses
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import ForwardCounter, tiny_config, tiny_model, tiny_tokenizer
from lossless import BLOCK_SIZE, assert_same, assert_same_for_every_drafter, drafters_of, generate, prompt_of


LORA = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@pytest.fixture
def target():
    return tiny_model("llama", seed=11)


def own_drafter(target, **kwargs):
    return D3DDrafterForCausalLM.from_backbone(target, block_size=BLOCK_SIZE, **kwargs)


def test_a_target_with_an_adapter(target):
    wrapped = get_peft_model(target, LoraConfig(**LORA)).eval()
    prompt = prompt_of()
    reference = wrapped.generate(input_ids=prompt, max_new_tokens=33, do_sample=False)
    assert not torch.equal(reference, generate(tiny_model("llama", seed=11), prompt))
    for name, drafter in drafters_of(reference).items():
        with ForwardCounter(target) as forwards:
            output = wrapped.generate(input_ids=prompt, max_new_tokens=33, do_sample=False, assistant_model=drafter)
        assert torch.equal(output, reference), name
        assert forwards.count == drafter.last_generation_stats.num_rounds


def test_a_drafter_with_an_adapter_drafts_with_it(target):
    prompt, drafter = prompt_of(), own_drafter(target)
    wrapped = get_peft_model(drafter, LoraConfig(**LORA)).eval()
    assert_same(target, prompt, wrapped)
    with_adapter = wrapped.last_generation_stats.num_accepted
    with wrapped.disable_adapter():
        assert_same(target, prompt, wrapped)
    assert wrapped.last_generation_stats.num_accepted != with_adapter


def test_a_mask_embedding_trained_beside_an_adapter(target):
    wrapped = get_peft_model(own_drafter(target), LoraConfig(modules_to_save=["mask_embedding"], **LORA))
    assert any("mask_embedding" in name for name, p in wrapped.named_parameters() if p.requires_grad)
    assert_same(target, prompt_of(), wrapped.eval())


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("compiled", ["target", "drafter"])
def test_compiled_models(target, compiled):
    drafter, prompt = own_drafter(target), prompt_of()
    reference = generate(target, prompt)
    if compiled == "target":
        output = generate(torch.compile(target, dynamic=True), prompt, drafter)
    else:
        output = generate(target, prompt, torch.compile(drafter, dynamic=True))
    assert torch.equal(output, reference)
    assert drafter.last_generation_stats.tokens_per_round > 1.5


@pytest.mark.parametrize("drafter_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_drafters_in_another_dtype_than_the_target(target, drafter_dtype):
    drafter = own_drafter(target).to(drafter_dtype)
    assert_same(target, prompt_of(), drafter)
    assert drafter.last_generation_stats.tokens_per_round > 1.5
    torch.manual_seed(0)
    sampled = generate(target, prompt_of(), drafter, do_sample=True)
    assert sampled.shape[1] == 39


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("quantised", ["target", "drafter"])
def test_int8_weights(target, quantised):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    drafter = own_drafter(target)
    quantize_(target if quantised == "target" else drafter, Int8WeightOnlyConfig())
    assert_same(target, prompt_of(), drafter)
    assert drafter.last_generation_stats.tokens_per_round > 1.3


@pytest.mark.parametrize("quantised", ["target", "drafter"])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
def test_a_dynamically_quantised_head(target, quantised):
    drafter = own_drafter(target)
    model = target if quantised == "target" else drafter
    head = torch.nn.Sequential(copy.deepcopy(model.lm_head))
    model.lm_head = torch.ao.quantization.quantize_dynamic(head, {torch.nn.Linear}, dtype=torch.qint8)[0]
    assert_same(target, prompt_of(), drafter)
    assert drafter.last_generation_stats.tokens_per_round > 1.3


@pytest.mark.parametrize("offloaded", ["target", "drafter"])
def test_device_map_with_layers_on_disk(target, offloaded, tmp_path):
    drafter, prompt = own_drafter(target), prompt_of()
    reference = generate(target, prompt)
    model = target if offloaded == "target" else drafter
    model.save_pretrained(tmp_path / "model")
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"]
    device_map = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    if offloaded == "drafter":
        device_map["mask_embedding"] = "disk"
    loaded = type(model).from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert any(parameter.device.type == "meta" for parameter in loaded.parameters())
    if offloaded == "target":
        target = loaded
    else:
        drafter = loaded
    assert torch.equal(generate(target, prompt, drafter), reference)
    assert drafter.last_generation_stats.tokens_per_round > 1.5


@pytest.mark.parametrize("rows", [60, 67, 80])
def test_padded_vocabularies_of_one_tokenizer(rows):
    """A drafter with fewer or more embedding rows than the target's vocabulary drafts in the target's."""
    target, prompt = tiny_model("llama", seed=11), prompt_of()
    prompt = prompt % 58 + 2
    model = tiny_model("qwen3", seed=12, vocab_size=rows)
    if rows < 67:
        target.lm_head.weight.data[60:] = 0  # ids that a padded vocabulary never emits
    drafter = D3DDrafterForCausalLM.from_backbone(model, block_size=4, vocab_size=67)
    for do_sample in (False, True):
        torch.manual_seed(0)
        reference = generate(target, prompt, do_sample=False)
        if not do_sample:
            assert int(reference.max()) < min(rows, 67)
            assert_same(target, prompt, drafter)
        else:
            assert generate(target, prompt, drafter, do_sample=True, top_k=20).shape == reference.shape


def test_another_vocabulary_is_refused_by_transformers(target):
    drafter = own_drafter(tiny_model("llama", vocab_size=90))
    with pytest.raises(ValueError, match="different tokenizers"):
        generate(target, prompt_of(), drafter)
    tokenizer = tiny_tokenizer()
    with ForwardCounter(target) as forwards, pytest.raises(ValueError, match="vocabulary has 90 tokens.*trained for"):
        generate(target, prompt_of(), drafter, tokenizer=tokenizer, assistant_tokenizer=tokenizer)
    assert forwards.count == 0


def recurrent_target(kind):
    torch.manual_seed(1)  # far from ties, which a hybrid's two forms of linear attention round in different ways
    if kind == "recurrent":
        config = MambaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=1, state_size=4)
        return MambaForCausalLM(config).eval()
    config = Qwen3NextConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=64,
        layer_types=["linear_attention", "full_attention"],
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_targets_with_recurrent_states(kind):
    """Since 5.25 they roll their states back, and are drafted for as others are; before, transformers refuses them."""
    target = recurrent_target(kind)
    if Version(transformers.__version__) >= Version("5.25"):
        assert_same_for_every_drafter(target, prompt_of())
        return
    with pytest.raises(ValueError, match="stateful"):
        generate(target, prompt_of(), own_drafter(tiny_model("llama")))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("tree_size", [0, 12])
def test_mask_token_of_the_vocabulary_is_never_drafted(target, mode, tree_size, monkeypatch):
    """Also where it is the drafter's favourite: the draft goes on with the next best."""
    drafter = own_drafter(target, mask_token_id=5)
    with torch.no_grad():
        drafter.lm_head.weight[5] = 100 * drafter.lm_head.weight.abs().max()
    drafter.generation_config.drafting_mode, drafter.generation_config.draft_tree_size = mode, tree_size
    drafter.generation_config.draft_from_text = False  # what the text holds may be any token
    verified, run = [], TargetPasses.run
    monkeypatch.setattr(
        TargetPasses, "run", lambda self, ids, tree: verified.extend(tree.tokens.tolist()) or run(self, ids, tree)
    )
    for seed in range(5):
        reference = generate(target, prompt_of(seed=seed))
        with ForwardCounter(target) as forwards:
            assert torch.equal(generate(target, prompt_of(seed=seed), drafter), reference)
        assert forwards.count == drafter.last_generation_stats.num_rounds < (20 if mode == "sync" else 33)
        for do_sample in (False, True):
            generate(target, prompt_of(seed=seed), drafter, do_sample=do_sample)
    assert len(verified) > 100 and 5 not in verified


def test_a_pipeline_takes_the_drafter_as_an_object(target):
    tokenizer = tiny_tokenizer()
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=own_drafter(target))
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    assert pipe("hello", **kwargs) == plain("hello", **kwargs)
    assert pipe.assistant_model.last_generation_stats.num_rounds > 0


def test_two_copies_of_the_code_at_once(target, tmp_path):
    """As with remote code: another copy of the classes, loaded under another name, with its own drafters."""
    source = d3d_hf.__path__[0]
    spec = importlib.util.spec_from_file_location(
        "second_d3d_hf", f"{source}/__init__.py", submodule_search_locations=[source]
    )
    copy_of_package = importlib.util.module_from_spec(spec)
    sys.modules["second_d3d_hf"] = copy_of_package
    try:
        spec.loader.exec_module(copy_of_package)
        theirs = copy_of_package.D3DDrafterForCausalLM.from_backbone(target, block_size=4)
        theirs.generation_config.drafting_mode = "sync"  # conftest.py sets the default of the first copy alone
        assert not isinstance(theirs, D3DDrafterForCausalLM)
        theirs.save_pretrained(tmp_path)
        for drafter in (theirs, own_drafter(target), copy_of_package.D3DDrafterForCausalLM.from_pretrained(tmp_path)):
            assert_same(target, prompt_of(), drafter)
            assert drafter.last_generation_stats.tokens_per_round > 1.5
    finally:
        for name in [name for name in sys.modules if name.startswith("second_d3d_hf")]:
            del sys.modules[name]
        # the second copy registered its own classes under the same names
        AutoConfig.register("d3d", d3d_hf.D3DConfig, exist_ok=True)
        AutoModelForCausalLM.register(d3d_hf.D3DConfig, D3DDrafterForCausalLM, exist_ok=True)


def test_a_training_step_right_after_a_generation_under_inference_mode(target):
    drafter, prompt = own_drafter(target), prompt_of()
    with torch.inference_mode():
        generate(target, prompt, drafter)
    drafter.train()(input_ids=prompt, labels=prompt).loss.backward()
    assert drafter.lm_head.weight.grad is not None


def test_every_architecture_as_a_target_of_one_drafter():
    drafter = own_drafter(tiny_model("gemma3", seed=3))
    for architecture in ("llama", "qwen3", "qwen3_moe", "gemma3"):
        assert_same(tiny_model(architecture, seed=4), prompt_of(), drafter)


def test_head_arithmetic_of_the_backbone_stays_in_force():
    """Soft-capped logits, scaled embeddings and logits: the target's own layers draft their first token right."""
    sizes = {
        "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None,
        "pad_token_id": 0, "initializer_range": 0.5,
    }  # fmt: skip
    for cls, config in (
        (Gemma2ForCausalLM, Gemma2Config(head_dim=8, sliding_window=8, final_logit_softcapping=5.0, **sizes)),
        (CohereForCausalLM, CohereConfig(logit_scale=0.3, **sizes)),
        (GraniteForCausalLM, GraniteConfig(logits_scaling=3.0, embedding_multiplier=2.0, **sizes)),
    ):
        torch.manual_seed(5)
        model = cls(config).eval()
        drafter = own_drafter(model)
        assert_same(model, prompt_of(), drafter)
        accepted = drafter.last_generation_stats.num_accepted
        assert sum(rounds for length, rounds in accepted.items() if length == 0) <= 1, cls.__name__
        with torch.no_grad():
            expected = model(prompt_of()).logits
            packed = drafter.packed_forward(
                torch.cat([prompt_of(), prompt_of()[:, :3]], 1), lay_out(6, torch.tensor([[5]]), (3,))
            ).logits
        torch.testing.assert_close(packed[:, :6], expected, atol=1e-4, rtol=1e-4)


def test_config_of_a_tiny_model_is_named_when_unknown():
    with pytest.raises(ValueError, match="'bert': choose one of"):
        tiny_config("bert")
