"""The fixture in conftest.py that fails a test where d3d_hf calls transformers in a deprecated way."""

import os
import warnings

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg

import d3d_hf
from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.testing import tiny_config, tiny_model
from lossless import generate, prompt_of


PACKAGE = os.path.dirname(d3d_hf.__file__)
OURS, HOOK = os.path.join(PACKAGE, "model", "modeling_d3d.py"), os.path.join(PACKAGE, "model", "generation_hook.py")


@deprecate_kwarg("old", version="99.0.0", new_name="new")
def deprecating(new=None):
    return new


@pytest.mark.parametrize("path, is_ours", [(OURS, True), (HOOK, False), (__file__, False)])
@pytest.mark.parametrize(
    "expression, message",
    [("config.torch_dtype", "`torch_dtype` is deprecated"), ("deprecating(old=1)", "`old` is deprecated")],
)
@pytest.mark.parametrize("_", ["first", "second"])  # what is reported once per process counts in each test
@pytest.mark.filterwarnings("default:.*old.*:FutureWarning")
def test_only_our_own_calls_count(deprecated_calls, expression, message, path, is_ours, _):
    names = {"config": tiny_config("llama"), "deprecating": deprecating}
    eval(compile(expression, path, "eval"), names)  # as if the expression stood in the file at that path
    seen, deprecated_calls[:] = list(deprecated_calls), []
    assert len(seen) == is_ours
    assert all(call.startswith(f"{OURS}:1: ") and message in call for call in seen)


def test_a_warning_about_our_own_line_is_an_error():
    with pytest.raises(FutureWarning, match="`old` is deprecated"):
        eval(
            compile("deprecating(old=1)", OURS, "eval"),
            {"deprecating": deprecating, "__name__": "d3d_hf.model.modeling_d3d"},
        )


def test_what_peft_asks_for_on_our_behalf_counts(deprecated_calls):
    """As with `is_gradient_checkpointing`, an old name that PEFT reads from the model that it is given."""
    asking = compile("ask = lambda model: model.config.torch_dtype", os.path.join(peft.__path__[0], "asks.py"), "exec")
    names = {}
    exec(asking, names)
    eval(compile("ask(model)", OURS, "eval"), {**names, "model": tiny_model("llama")})
    seen, deprecated_calls[:] = list(deprecated_calls), []
    assert len(seen) == 1 and seen[0].startswith(f"{OURS}:1: ")


@pytest.fixture
def no_deprecations():
    """Whatever warns of a deprecation, ours or not, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        yield


def train_a_step(drafter, folder, **kwargs):
    arguments = d3d_hf.D3DTrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": prompt_of(24, seed)[0].tolist(), "prompt_length": 8} for seed in range(2)]
    trainer = d3d_hf.D3DTrainer(drafter, arguments, train_dataset=rows, **kwargs)
    trainer.train()
    return trainer


@pytest.mark.parametrize("loader", [D3DDrafterForCausalLM, AutoModelForCausalLM])
@pytest.mark.parametrize("mode", ["sync", "async", "auto"])
def test_a_whole_drafter_from_its_making_to_generation(tmp_path, no_deprecations, loader, mode):
    target = tiny_model("llama", seed=11)
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=4, chained_head_size=8)
    train_a_step(drafter, tmp_path / "run")
    drafter.save_pretrained(tmp_path / "drafter")
    drafter = loader.from_pretrained(tmp_path / "drafter")
    drafter.generation_config.drafting_mode = mode
    assert torch.equal(generate(target, prompt_of(), drafter), generate(target, prompt_of()))
    assert drafter.last_generation_stats.num_rounds > 0


@pytest.mark.parametrize("loader", [D3DDrafterForCausalLM, AutoModelForCausalLM])
def test_an_adapter_drafter_from_its_making_to_generation(tmp_path, no_deprecations, loader):
    target = tiny_model("llama", seed=11)
    target.save_pretrained(tmp_path / "target")
    drafter = D3DDrafterForCausalLM.from_backbone(str(tmp_path / "target"), block_size=4)
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mask_embedding"])
    trainer = train_a_step(drafter, tmp_path / "run", peft_config=lora)
    trainer.model.get_base_model().save_pretrained(tmp_path / "drafter")
    from_target = D3DDrafterForCausalLM.from_target(target, adapter=str(tmp_path / "drafter"))
    reference = generate(target, prompt_of())
    for drafter in (loader.from_pretrained(tmp_path / "drafter"), from_target):
        assert torch.equal(generate(target, prompt_of(), drafter), reference)
        assert drafter.last_generation_stats.num_rounds > 0


@pytest.mark.parametrize("is_on", [False, True])
def test_both_names_of_checkpointing_agree(no_deprecations, is_on):
    drafter = D3DDrafterForCausalLM.from_backbone(tiny_model("llama"), block_size=4)
    has_new_name = hasattr(PreTrainedModel, "is_activation_checkpointing")
    if is_on:
        getattr(drafter, f"{'activation' if has_new_name else 'gradient'}_checkpointing_enable")()
    assert drafter.is_gradient_checkpointing is is_on
    if has_new_name:
        assert drafter.is_activation_checkpointing is is_on
