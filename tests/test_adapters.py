"""Drafters that are stored as an adapter on a named base, merged or sharing the live target's memory."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model.packing import lay_out
from d3d_hf.testing import tiny_model
from lossless import assert_same, generate, prompt_of


def packed_logits(drafter):
    layout, ids = lay_out(6, torch.tensor([[5]]), (3,)), prompt_of(9)
    with torch.no_grad():
        return drafter.packed_forward(ids, layout).logits


@pytest.fixture(params=[{"kept": None, "tied": False}, {"kept": [0, 2], "tied": True}], ids=["whole", "kept-tied"])
def case(request, tmp_path):
    """(target, folder of an adapter drafter on it, its logits)."""
    model = tiny_model(
        "llama", seed=11, num_layers=3, initializer_range=0.2, tie_word_embeddings=request.param["tied"]
    )
    model.save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4, kept_layers=request.param["kept"])
    lora = LoraConfig(
        r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, modules_to_save=["mask_embedding"]
    )
    wrapped = get_peft_model(drafter, lora)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    wrapped.get_base_model().eval().save_pretrained(tmp_path / "drafter")
    return target, tmp_path / "drafter", packed_logits(wrapped.get_base_model())


def test_only_the_adapter_is_stored(case):
    _, folder, _ = case
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".py" and path.is_file()}
    assert files == {
        "config.json", "generation_config.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
    }  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["adapter_base"].endswith("target")


@pytest.mark.parametrize("loader", [D3DDrafterForCausalLM, AutoModelForCausalLM])
def test_loaded_merged_it_is_an_ordinary_drafter(case, loader, tmp_path):
    target, folder, expected = case
    drafter = loader.from_pretrained(folder)
    assert type(drafter) is D3DDrafterForCausalLM and not any("lora" in name for name in drafter.state_dict())
    torch.testing.assert_close(packed_logits(drafter), expected, atol=1e-4, rtol=1e-4)
    assert_same(target, prompt_of(), drafter)
    drafter.save_pretrained(tmp_path / "whole")
    assert drafter.config.adapter_base is None
    again = D3DDrafterForCausalLM.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(packed_logits(again), expected, atol=1e-4, rtol=1e-4)
    assert D3DDrafterForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_what_an_auto_class_adds_for_itself_is_not_handed_on_to_the_next(case):
    """Its own Auto class is given them once more, and takes what it does not know for a part of the base's config."""
    _, folder, expected = case
    drafter = D3DDrafterForCausalLM.from_pretrained(
        folder, _from_auto=True, _commit_hash="0", _of_a_later_release=1, code_revision="main", adapter_kwargs={}
    )
    torch.testing.assert_close(packed_logits(drafter), expected, atol=1e-4, rtol=1e-4)


def test_loaded_beside_its_base_it_can_be_saved_again(case, tmp_path):
    _, folder, expected = case
    drafter = D3DDrafterForCausalLM.from_pretrained(folder, merge_adapter=False)
    torch.testing.assert_close(packed_logits(drafter), expected, atol=1e-4, rtol=1e-4)
    drafter.save_pretrained(tmp_path / "again")
    again = D3DDrafterForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(packed_logits(again), expected, atol=1e-4, rtol=1e-4)


def storages(model):
    tensors = [*model.parameters(), *model.buffers()]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def test_on_the_live_target_it_adds_the_adapters_memory_alone(case):
    target, folder, expected = case
    before = {name: (parameter.requires_grad, parameter.data_ptr()) for name, parameter in target.named_parameters()}
    reference = generate(target, prompt_of())
    drafter = D3DDrafterForCausalLM.from_target(target, adapter=folder)
    torch.testing.assert_close(packed_logits(drafter), expected, atol=1e-4, rtol=1e-4)

    held, added = storages(target), storages(drafter)
    added_bytes = sum(size for pointer, size in added.items() if pointer not in held)
    own = [p for name, p in drafter.named_parameters() if "lora" in name or "mask_embedding" in name]
    assert added_bytes <= sum(p.numel() * p.element_size() for p in own)
    assert len(added.keys() & held.keys()) > 10

    assert before == {name: (p.requires_grad, p.data_ptr()) for name, p in target.named_parameters()}
    target_modules = {id(module) for module in target.modules()}
    assert not any(id(module) in target_modules for module in drafter.modules())
    assert torch.equal(generate(target, prompt_of()), reference), "the target is as it was"
    assert_same(target, prompt_of(), drafter)
    is_tied = target.lm_head.weight is target.model.embed_tokens.weight
    assert (drafter.lm_head.weight is drafter.model.embed_tokens.weight) == is_tied


def test_errors_name_the_value_and_the_mend(case, tmp_path):
    target, folder, _ = case
    other = tiny_model("qwen3")
    with pytest.raises(ValueError, match="trained on '.*target'.*llama.*base is qwen3.*pass the model"):
        D3DDrafterForCausalLM.from_target(other, adapter=folder)
    D3DDrafterForCausalLM.from_backbone(target).save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="holds a whole drafter: load it with from_pretrained"):
        D3DDrafterForCausalLM.from_target(target, adapter=tmp_path / "whole")
    nameless = D3DDrafterForCausalLM.from_backbone(tiny_model("llama"))
    get_peft_model(nameless, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="names no base.*adapter_base"):
        nameless.save_pretrained(tmp_path / "nameless")
