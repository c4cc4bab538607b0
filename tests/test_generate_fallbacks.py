"""What generate can do without a drafter it can do with one: plain, with one warning that says why."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import StaticCache, T5Config, T5ForConditionalGeneration

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.model.backbones import cache_argument
from d3d_hf.testing import ForwardCounter, oracle_drafter, tiny_model
from lossless import generate, prompt_of


VERIFIES_ON_STATIC_CACHES = Version(transformers.__version__) >= Version("5.24")


@pytest.fixture
def target():
    return tiny_model("llama", seed=11)


@pytest.fixture
def drafter(target):
    return D3DDrafterForCausalLM.from_backbone(target, block_size=4)


def assert_plain_with_one_warning(target, prompt, drafter, reason, caplog, **kwargs):
    reference = generate(target, prompt, **kwargs)
    for _ in range(2):
        with ForwardCounter(target) as forwards:
            output = generate(target, prompt, drafter, **kwargs)
        assert torch.equal(output, reference)
        assert forwards.count == reference.shape[1] - prompt.shape[1]
    assert caplog.text.count("Generating without drafts") == 1 and reason in caplog.text
    stats = drafter.last_generation_stats
    assert stats.door == "plain" and reason in stats.door_reason and stats.num_rounds == 0


def test_batches(target, drafter, caplog):
    prompt = torch.cat([prompt_of(seed=seed) for seed in range(3)])
    assert_plain_with_one_warning(target, prompt, drafter, "batch size is 3", caplog)


def test_no_cache(target, drafter, caplog):
    assert_plain_with_one_warning(target, prompt_of(), drafter, "use_cache is False", caplog, use_cache=False)


def test_train_mode(target, drafter, caplog):
    assert_plain_with_one_warning(target, prompt_of(), drafter.train(), "call drafter.eval()", caplog)


def test_a_drafter_on_the_meta_device(target, drafter, caplog):
    assert_plain_with_one_warning(target, prompt_of(), drafter.to("meta"), "load its weights", caplog)


@pytest.mark.skipif(VERIFIES_ON_STATIC_CACHES, reason="this release verifies on static caches")
def test_static_caches_where_transformers_refuses_them(target, drafter, caplog):
    assert_plain_with_one_warning(
        target, prompt_of(), drafter, "StaticCache, cannot be rolled back", caplog, cache_implementation="static"
    )


@pytest.mark.skipif(not VERIFIES_ON_STATIC_CACHES, reason="this release refuses static caches")
@pytest.mark.parametrize("given", [True, False])
def test_static_caches_where_transformers_takes_them(target, given):
    prompt = prompt_of()
    reference = generate(target, prompt)
    drafter = oracle_drafter(reference, block_size=5)
    make = (
        (lambda: {"cache": StaticCache(config=target.config, max_cache_len=64)})
        if given
        else (lambda: {"cache_implementation": "static"})
    )
    with ForwardCounter(target) as forwards:
        assert torch.equal(generate(target, prompt, drafter, **make()), reference)
    assert forwards.count == 6
    assert drafter.last_generation_stats.door == "candidate generator"


class UncroppableCache(transformers.DynamicCache):
    """As a quantised cache: it cannot take tokens back."""

    is_croppable = False


def test_caches_that_cannot_be_rolled_back(target, drafter, caplog):
    prompt = prompt_of()
    reference = generate(target, prompt)
    for _ in range(2):
        cache = UncroppableCache()
        with ForwardCounter(target) as forwards:
            assert torch.equal(generate(target, prompt, drafter, **{cache_argument(target): cache}), reference)
        assert forwards.count == 33 and cache.get_seq_length() == 38
    assert caplog.text.count("UncroppableCache, cannot be rolled back") == 1
    assert drafter.last_generation_stats.door == "plain"


@pytest.mark.parametrize("kwargs", [{"num_beams": 3}, {"num_beams": 2, "do_sample": True}])
def test_beams_are_searched_without_the_drafter(target, drafter, kwargs):
    prompt = prompt_of()
    torch.manual_seed(0)
    reference = generate(target, prompt, **kwargs)
    torch.manual_seed(0)
    assert torch.equal(generate(target, prompt, drafter, **kwargs), reference)
    assert drafter.last_generation_stats is None


def test_several_return_sequences_are_refused_by_transformers(target, drafter):
    with pytest.raises(ValueError, match="num_return_sequences has to be 1"):
        generate(target, prompt_of(), drafter, do_sample=True, num_return_sequences=2)


def test_encoder_decoder_targets_are_refused_before_any_work(drafter):
    config = T5Config(vocab_size=67, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    target = T5ForConditionalGeneration(config).eval()
    with ForwardCounter(target) as forwards, pytest.raises(ValueError, match="encoder-decoder"):
        target.generate(prompt_of(), max_new_tokens=4, assistant_model=drafter)
    assert forwards.count == 0


def test_each_reason_is_told_once_for_each_drafter(target, drafter, caplog):
    other = D3DDrafterForCausalLM.from_backbone(target)
    batch = torch.cat([prompt_of(), prompt_of()])
    for model in (drafter, drafter, other):
        generate(target, batch, model)
        generate(target, prompt_of(), model, use_cache=False)
    assert caplog.text.count("batch size is 2") == 2
    assert caplog.text.count("use_cache is False") == 2


def test_a_wrong_option_is_an_error_and_no_work_is_done(target, drafter):
    drafter.generation_config.num_assistant_tokens = -1
    with ForwardCounter(target) as forwards, pytest.raises(ValueError, match="num_assistant_tokens is -1"):
        generate(target, prompt_of(), drafter)
    assert forwards.count == 0


def test_statistics_say_what_the_last_call_ran_in(target, drafter):
    batch = torch.cat([prompt_of(), prompt_of(seed=1)])
    for _ in range(2):
        generate(target, prompt_of(), drafter)
        stats = drafter.last_generation_stats
        assert (stats.door, stats.door_reason) == ("loop", None) and stats.num_rounds > 0
        generate(target, batch, drafter)
        stats = drafter.last_generation_stats
        assert stats.door == "plain" and "batch size is 2" in stats.door_reason and stats.num_rounds == 0


def test_dictionary_outputs_of_plain_fallbacks(target, drafter):
    batch = torch.cat([prompt_of(), prompt_of(seed=1)])
    output = generate(target, batch, drafter, return_dict_in_generate=True, output_scores=True)
    assert output.sequences.shape == (2, 39) and len(output.scores) == 33
