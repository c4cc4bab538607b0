"""Models of known shapes: their parameters add up to the published counts, and tiny ones run."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from d3d_hf.cost_model.shapes import SHAPE_NAMES, random_model, shape_config


# Published parameter counts, tied embeddings counted once.
NUM_PARAMETERS = {
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_shapes_are_those_of_the_published_models(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", ["qwen3-8b", "smollm2-360m"])
def test_a_tiny_variant_runs_and_keeps_the_groups_of_heads(name):
    whole, tiny = shape_config(name), shape_config(name, tiny=True, num_layers=3)
    assert type(whole) is type(tiny) and tiny.num_hidden_layers == 3
    assert tiny.rope_parameters == whole.rope_parameters
    groups = [config.num_attention_heads // config.num_key_value_heads for config in (whole, tiny)]
    assert groups[0] == groups[1]
    torch.manual_seed(7)
    model, again = (random_model(tiny, torch.float32, seed=3) for _ in range(2))
    assert float(torch.rand(())) == float(torch.rand((), generator=torch.Generator().manual_seed(7)))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, again(ids).logits) and logits.std() > 0
    assert model.generate(ids, max_new_tokens=9, do_sample=False).shape == (1, 14)


def test_unknown_shapes_are_refused():
    with pytest.raises(ValueError, match="shape is 'qwen3-9b': choose one of qwen3-1.7b"):
        shape_config("qwen3-9b")
    with pytest.raises(ValueError, match="num_layers is 0: give at least 1"):
        shape_config("qwen3-8b", num_layers=0)
