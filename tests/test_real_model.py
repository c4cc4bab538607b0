"""A real target, SmolLM2-135M-Instruct, with its own layers as the drafter, on real prompts."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from d3d_hf import D3DDrafterForCausalLM, embedded
from d3d_hf.testing import ForwardCounter


NUM_NEW_TOKENS = 24
NUM_DEFAULT = 8  # `make test` runs so many, `make test-slow` the rest: in float32 on one core a prompt takes 4 s
PROMPTS = (
    "What is the capital of Australia?",
    "What is 17 times 23? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five fruits that are red.",
    "A: Good morning! Did you sleep well?\nB: Not really, the dog barked all night.\nA: Oh no. What will you do now?",
    "¿Cuál es la capital de Francia y qué río pasa por ella?",
    "Hi",
    "Summarise in one sentence: The lighthouse keeper had lived alone on the rock for eleven years. Every evening he "
    "climbed the hundred and twelve steps, lit the lamp, and wrote one line in a book: the wind, the sea, the ships. "
    "On the night of the great storm he wrote nothing, because the lamp went out and he stood at the window with a "
    "torch until the morning, and three ships came home.",
    "Who wrote Romeo and Juliet, and when?",
    "Tom has 12 apples. He gives a third of them to Anna and eats two. How many are left?",
    "Explain what this SQL query does: SELECT name, COUNT(*) FROM orders GROUP BY name HAVING COUNT(*) > 3;",
    "Give me a recipe for pancakes as a numbered list.",
    "User: My printer does not print.\nSupport: Is it switched on?\nUser: Yes, the light is green.\nSupport:",
    "Übersetze ins Englische: Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung.",
    "请用一句话介绍长城。",
    "Traduis en anglais : « Le chat dort sur le canapé depuis ce matin. »",
    "Count from 1 to 15, separated by commas.",
    "Fix the bug:\n\ndef mean(xs):\n    total = 0\n    for x in xs:\n        total =+ x\n    return total / len(xs)\n",
    "Write a haiku about the sea in winter.",
    "What is the boiling point of water in degrees Celsius, Fahrenheit and Kelvin?",
)
IN_BFLOAT16 = (2, 5, 7)


@pytest.fixture(scope="module")
def models(embedded_target):
    """Target and drafter in float32, and the tokenizer."""
    _, tokenizer = embedded_target
    target = AutoModelForCausalLM.from_pretrained(embedded.target_folder(), dtype=torch.float32)
    return target, D3DDrafterForCausalLM.from_backbone(target, block_size=8), tokenizer


def encode(tokenizer, prompt):
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(text, id=f"{i}", marks=[pytest.mark.slow] if i >= NUM_DEFAULT else [])
        for i, text in enumerate(PROMPTS)
    ],
)
def test_greedy_ids_equal_plain_generation_in_fewer_forwards(models, prompt):
    target, drafter, tokenizer = models
    inputs = encode(tokenizer, prompt)
    options = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False}
    reference = target.generate(**inputs, **options)
    with ForwardCounter(target) as forwards:
        output = target.generate(**inputs, assistant_model=drafter, **options)
    assert output.tolist() == reference.tolist()
    num_new_tokens = output.shape[1] - inputs["input_ids"].shape[1]
    assert forwards.count == drafter.last_generation_stats.num_rounds
    assert forwards.count <= 0.62 * num_new_tokens


@pytest.mark.parametrize("prompt", [pytest.param(PROMPTS[i], id=f"{i}") for i in IN_BFLOAT16])
def test_in_bfloat16_every_id_is_the_argmax_or_a_rounding_tie(embedded_target, models, prompt):
    """Under teacher forcing, with float32 logits, up to what bfloat16 moves the logits of likely tokens by there."""
    (target, tokenizer), exact_target = embedded_target, models[0]
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=8)
    inputs = encode(tokenizer, prompt)
    prompt_length = inputs["input_ids"].shape[1]
    with ForwardCounter(target) as forwards:
        output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    emitted = output[0, prompt_length:]
    assert forwards.count <= 0.62 * len(emitted)
    with torch.no_grad():
        exact, rounded = (model(output).logits[0, prompt_length - 1 : -1].float() for model in (exact_target, target))
    likely = exact.topk(50).indices  # (new tokens, 50)
    noise = (exact - rounded).gather(1, likely).abs().amax(dim=1)
    gap = exact.amax(dim=1) - exact.gather(1, emitted[:, None]).squeeze(1)
    assert (gap <= 2 * noise).all()
    first, second = exact.topk(2).values.unbind(dim=1)
    assert (first - second > 2 * noise).float().mean() > 0.6, "the bound would let second-best tokens through"
