"""Compiled forwards of the target against the model's own. Compiling is slow: most tests share one compiled model."""

import copy
import logging
import pickle
import threading

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import d3d_hf
from d3d_hf.compiled import layer_graph as layer_graph_module
from d3d_hf.compiled.layer_graph import LayerGraph
from d3d_hf.model.backbones import cache_argument
from d3d_hf.model.storage import GrowingCache
from d3d_hf.testing import ForwardCounter, acceptance_profile_drafter, oracle_drafter, tiny_model
from lossless import prompt_of


DRAFT_LENGTHS = (4,)
LOG = "d3d_hf.compiled.target"


@pytest.fixture(scope="module")
def shared():
    """A compiled model and its plain twin."""
    model = d3d_hf.compile_target(tiny_model(), draft_lengths=DRAFT_LENGTHS)
    return model, tiny_model()


def passes_of(model) -> int:
    return model._compiled_target.num_static_passes


def generate(model, prompt, **kwargs):
    kwargs = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(prompt), **kwargs}
    return model.generate(prompt, **kwargs)


def assert_same_text(model, twin, is_compiled=True, **kwargs):
    prompt = prompt_of()
    before = passes_of(model)
    with ForwardCounter(model) as forwards:
        output = generate(model, prompt, **kwargs)
    assert output.tolist() == generate(twin, prompt, **kwargs).tolist()
    assert passes_of(model) - before == (forwards.count - 1 if is_compiled else 0)


@pytest.mark.parametrize("kwargs", [{}, {"prompt_lookup_num_tokens": 3}], ids=["plain", "prompt lookup"])
def test_same_text(shared, kwargs):
    assert_same_text(*shared, **kwargs)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_same_text_with_a_drafter(shared, mode):
    model, twin = shared
    reference = generate(twin, prompt_of())
    for drafter in (
        oracle_drafter(reference, block_size=4),
        acceptance_profile_drafter(reference, [0.9, 0.7, 0.5], block_size=4),
    ):
        drafter.generation_config.drafting_mode = mode
        assert_same_text(model, twin, assistant_model=drafter)


def test_same_sampled_text(shared):
    model, twin = shared
    outputs = []
    for one in (model, twin):
        torch.manual_seed(3)
        outputs.append(generate(one, prompt_of(), do_sample=True, temperature=0.3).tolist())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("num_padding", [0, 3])
@torch.no_grad()
def test_logits(shared, num_tokens, num_padding):
    """A static pass, padded to its bucket, against a dynamic cache; then again after the pass was cropped."""
    model, twin = shared
    prompt, more = prompt_of(9), prompt_of(num_tokens, seed=1)
    mask = torch.ones(1, 9 + num_tokens, dtype=torch.long)
    mask[:, :num_padding] = 0
    key, logits = cache_argument(twin), []
    for one, cache in ((model, GrowingCache(2)), (twin, DynamicCache())):
        one(input_ids=prompt, attention_mask=mask[:, :9], use_cache=True, **{key: cache})
        for _ in range(2):
            outputs = one(input_ids=more, attention_mask=mask, use_cache=True, **{key: cache})
            assert cache.get_seq_length() == 9 + num_tokens
            cache.crop(-num_tokens)
        logits.append(outputs.logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)


def write_in_place(model):
    model.model.layers[1].mlp.up_proj.weight.mul_(-1)


def write_through_data(model):
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(-1)


def write_norm(model):
    model.model.layers[1].input_layernorm.weight.mul_(0.5)


def write_head(model):
    model.lm_head.weight.data.mul_(-1)


def replace_parameter(model):
    projection = model.model.layers[1].self_attn.o_proj
    projection.weight = nn.Parameter(-projection.weight)


def load_other_weights(model):
    model.load_state_dict(tiny_model(seed=5).state_dict())


@pytest.mark.parametrize(
    "change", [write_in_place, write_through_data, write_norm, write_head, load_other_weights, replace_parameter]
)
@torch.no_grad()
def test_changed_weights_are_noticed(shared, change):
    model, twin = shared
    state = copy.deepcopy(twin.state_dict())
    before = generate(twin, prompt_of()).tolist()
    try:
        for one in shared:
            change(one)
        assert generate(twin, prompt_of()).tolist() != before
        assert_same_text(model, twin)
    finally:
        for one in shared:
            one.load_state_dict(state)
    assert_same_text(model, twin)


def test_copies_and_files_are_plain(shared, tmp_path):
    model, twin = shared
    model.save_pretrained(tmp_path)
    loaded = type(twin).from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    reference = generate(twin, prompt_of()).tolist()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(other) is type(twin)
        assert not hasattr(other, "_compiled_target")
        before = passes_of(model)
        assert generate(other, prompt_of()).tolist() == reference
        assert passes_of(model) == before
    assert isinstance(model, type(twin))


def test_two_threads(shared):
    model, twin = shared
    prompts = [prompt_of(6, seed=seed) for seed in range(2)]
    outputs = {}
    threads = [
        threading.Thread(target=lambda i=i: outputs.update({i: generate(model, prompts[i]).tolist()})) for i in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [outputs[i] for i in (0, 1)] == [generate(twin, prompt).tolist() for prompt in prompts]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 2},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=["beams", "hidden states", "no cache", "static cache"],
)
def test_calls_that_run_as_before(shared, kwargs):
    model, twin = shared
    before = passes_of(model)
    outputs = [generate(one, prompt_of(), max_new_tokens=6, disable_compile=True, **kwargs) for one in shared]
    ids = [getattr(output, "sequences", output).tolist() for output in outputs]
    assert ids[0] == ids[1]
    if "output_hidden_states" in kwargs:
        first, second = (output.hidden_states[-1] for output in outputs)
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
    assert passes_of(model) == before
    assert_same_text(model, twin)


def test_batches_run_as_before(shared):
    model, twin = shared
    batch, before = torch.cat([prompt_of(6, seed=1), prompt_of(6, seed=2)]), passes_of(model)
    assert generate(model, batch).tolist() == generate(twin, batch).tolist()
    assert passes_of(model) == before


def test_a_cache_of_the_callers_is_kept(shared):
    model, twin = shared
    key, caches = cache_argument(twin), (DynamicCache(), DynamicCache())
    first, second = (generate(one, prompt_of(), **{key: cache}) for one, cache in zip(shared, caches))
    assert first.tolist() == second.tolist()
    assert caches[0].get_seq_length() == caches[1].get_seq_length() > 0


def test_the_second_turn_is_compiled(shared):
    model, twin = shared
    key, texts = cache_argument(twin), []
    for one in shared:
        turn = generate(one, prompt_of(), max_new_tokens=6, return_dict_in_generate=True)
        longer = torch.cat([turn.sequences, prompt_of(2, seed=7)], dim=1)
        before = passes_of(model)
        texts.append(generate(one, longer, max_new_tokens=6, **{key: turn[key]}).tolist())
        if one is model:
            assert passes_of(model) > before
    assert texts[0] == texts[1]


def test_undone():
    model = tiny_model()
    plain_class = type(model)
    with d3d_hf.compiled_target(model) as same:
        assert same is model and type(model) is not plain_class
    assert type(model) is plain_class and not hasattr(model, "_compiled_target")
    assert d3d_hf.uncompile_target(model) is model


def failing_compile(*args, **kwargs):
    raise RuntimeError("no C++ compiler here\nand a second line")


def graph_that_is_wrong(self, *args, **kwargs):
    return _call_of_graph(self, *args, **kwargs) + 0.1


_call_of_graph = LayerGraph.__call__


@pytest.mark.parametrize(
    "where, name, fault, reason",
    [
        (torch._inductor, "compile", failing_compile, "no C++ compiler here"),
        (LayerGraph, "__call__", graph_that_is_wrong, "layer 0 and its graph differ"),
    ],
    ids=["compiler", "wrong graph"],
)
def test_runs_as_before_with_one_line(monkeypatch, caplog, where, name, fault, reason):
    monkeypatch.setattr(where, name, fault)
    model, twin = d3d_hf.compile_target(tiny_model(), draft_lengths=DRAFT_LENGTHS), tiny_model()
    with caplog.at_level(logging.WARNING):
        assert_same_text(model, twin, is_compiled=False)
        assert_same_text(model, twin, is_compiled=False)
    assert [reason in record.message and "\n" not in record.message for record in caplog.records] == [True]


def test_hooks_in_layers_run_as_before(caplog):
    model, calls = d3d_hf.compile_target(tiny_model(), draft_lengths=DRAFT_LENGTHS), []
    model.model.layers[1].mlp.register_forward_hook(lambda *args: calls.append(1))
    with caplog.at_level(logging.WARNING, logger=LOG):
        assert_same_text(model, tiny_model(), is_compiled=False)
    assert len(calls) == 24
    assert [record.message for record in caplog.records] == [
        "LlamaForCausalLM cannot be compiled and runs as before: mlp carries hooks."
    ]


@pytest.mark.parametrize("change", [lambda model: model.half(), lambda model: model.to("meta")], ids=["fp16", "meta"])
def test_unknown_dtypes_and_devices_are_left_alone(caplog, change):
    model = change(tiny_model())
    plain_class = type(model)
    with caplog.at_level(logging.WARNING, logger=LOG):
        assert type(d3d_hf.compile_target(model)) is plain_class
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"draft_lengths": ()}, r"draft_lengths is \(\)"),
        ({"draft_lengths": (0, 8)}, r"draft_lengths is \(0, 8\)"),
        ({"draft_lengths": (2.5,)}, r"draft_lengths is \(2.5,\)"),
        ({"max_context": 0}, "max_context is 0"),
    ],
)
def test_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        d3d_hf.compile_target(tiny_model(), **kwargs)


def test_only_targets():
    with pytest.raises(ValueError, match="Linear is no model of transformers"):
        d3d_hf.compile_target(nn.Linear(2, 2))
    drafter = d3d_hf.D3DDrafterForCausalLM.from_backbone(tiny_model())
    with pytest.raises(ValueError, match="is a drafter"):
        d3d_hf.compile_target(drafter)


def test_growing_cache_is_a_dynamic_one():
    """Updates and crops of all sizes, across two growths."""
    torch.manual_seed(0)
    growing, dynamic = GrowingCache(1, max_length=300), DynamicCache()
    for num_new, num_removed in ((200, 0), (5, 3), (90, 20), (1, 1), (300, 40), (9, 9)):
        keys, values = torch.randn(2, 1, 2, num_new, 4)
        expected = dynamic.update(keys, values, 0)
        assert growing.get_mask_sizes(num_new, 0) == (expected[0].shape[2], 0)
        for ours, theirs in zip(growing.update(keys, values, 0), expected):
            assert torch.equal(ours, theirs)
        for cache in (growing, dynamic):
            cache.crop(-num_removed)
        assert growing.get_seq_length() == dynamic.get_seq_length()
        assert growing.capacity & (growing.capacity - 1) == 0
    assert growing.capacity == 1024


def test_a_static_pass_shows_the_whole_storage():
    cache = GrowingCache(1)
    cache.update(torch.ones(1, 2, 250, 4), torch.ones(1, 2, 250, 4), 0)
    capacity = cache.capacity
    cache.begin_static_pass(capacity - 250 + 1)
    assert cache.capacity == 2 * capacity and cache.is_compileable
    keys, _ = cache.update(*torch.full((2, 1, 2, capacity - 249, 4), 2.0), 0)
    assert keys.shape[2] == 2 * capacity and cache.get_mask_sizes(1, 0) == (2 * capacity, 0)
    assert keys[0, 0, :, 0].tolist() == [1.0] * 250 + [2.0] * (capacity - 249) + [0.0] * (capacity - 1)
    cache.end_static_pass(2)
    assert cache.get_seq_length() == 252 and not cache.is_compileable


def test_layers_of_one_kind_share_a_graph(shared):
    model, twin = shared
    assert_same_text(model, twin)
    assert all(group == 0 for group, *_ in model._compiled_target._graphs)
    odd = copy.deepcopy(twin)
    odd.model.layers[1].self_attn.scaling *= 2
    kinds = [layer_graph_module.signature_of(layer) for layer in (*twin.model.layers, odd.model.layers[1])]
    assert kinds[0] == kinds[1] != kinds[2]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "gemma3"])
def test_architectures(architecture):
    model = d3d_hf.compile_target(tiny_model(architecture), draft_lengths=DRAFT_LENGTHS)
    twin = tiny_model(architecture)
    is_compiled = architecture != "qwen3_moe"  # its experts in float32 cannot be traced
    assert_same_text(model, twin, is_compiled=is_compiled)
    assert_same_text(model, twin, is_compiled=is_compiled, prompt_lookup_num_tokens=3)


@pytest.mark.slow
def test_adapters_switch():
    from peft import LoraConfig, get_peft_model

    model, twin = d3d_hf.compile_target(tiny_model(), draft_lengths=DRAFT_LENGTHS), tiny_model()
    adapters, texts = [], []
    for one in (model, twin):
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        adapters.append(get_peft_model(one, config).eval().base_model)
    for switch in ("enable_adapter_layers", "disable_adapter_layers", "enable_adapter_layers", "merge_adapter"):
        for adapter in adapters:
            getattr(adapter, switch)()
        assert_same_text(model, twin)
        texts.append(generate(twin, prompt_of()).tolist())
    assert texts[0] == texts[2] == texts[3] != texts[1]


@pytest.mark.slow
def test_text_outgrows_its_storage(monkeypatch):
    monkeypatch.setattr("d3d_hf.model.storage.MIN_CAPACITY", 16)
    monkeypatch.setattr("d3d_hf.model.storage._FIRST_ROOM", 4)
    monkeypatch.setattr("d3d_hf.model.storage._SLACK", 0)
    model = d3d_hf.compile_target(tiny_model(), draft_lengths=DRAFT_LENGTHS)
    assert_same_text(model, tiny_model(), max_new_tokens=40)
    assert {capacity for *_, capacity in model._compiled_target._graphs} == {16, 32, 64}
