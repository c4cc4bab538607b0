"""What the examples draft with: a real target that needs no hub and its drafter, or tiny random models (`--tiny`)."""

import json
from pathlib import Path

import torch

from d3d_hf import D3DDrafterForCausalLM, embedded, testing


ROOT = Path(__file__).resolve().parent.parent
DRAFTER = ROOT / "hub_cards" / "d3d-smollm2-135m"
PROMPTS = ROOT / "examples" / "data" / "prompts.jsonl"


def load_target(tiny: bool = False):
    """
    The target and its tokenizer. Yours: `AutoModelForCausalLM.from_pretrained("org/target", dtype="auto")` and
    `AutoTokenizer.from_pretrained("org/target")`.
    """
    if tiny:
        return testing.tiny_model(num_layers=4), testing.tiny_tokenizer()
    return embedded.load_target()


def load_drafter(target, tiny: bool = False) -> D3DDrafterForCausalLM:
    """A drafter for the target. Yours: `D3DDrafterForCausalLM.from_pretrained("org/d3d-drafter", dtype="auto")`."""
    if tiny:
        return D3DDrafterForCausalLM.from_backbone(target, block_size=4)
    return D3DDrafterForCausalLM.from_pretrained(DRAFTER, dtype=target.dtype)


def encode(tokenizer, messages: str | list[dict]):
    """The inputs of `generate` for a conversation, or for a single question."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def own_answers(target, tokenizer, num_answers: int, max_new_tokens: int) -> list[dict]:
    """
    The target's greedy answers to some prompts, as rows to train and to prune with. For more than a handful:
    `d3d-hf regenerate --target org/target --prompts prompts.jsonl --output answers`.
    """
    rows = []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:num_answers]:
        inputs = encode(tokenizer, json.loads(line)["turns"][0])
        ids = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        rows.append({"input_ids": ids[0].tolist(), "prompt_length": inputs["input_ids"].shape[1]})
    return rows


def compare_ids(left: torch.Tensor, right: torch.Tensor) -> str:
    """Whether two answers, of shape `(length,)` each, are the same, and where they part if not."""
    if torch.equal(left, right):
        return "yes"
    common = min(len(left), len(right))
    differing = (left[:common] != right[:common]).nonzero()
    first = int(differing[0]) if len(differing) else common
    return f"no, from token {first + 1} on (in bf16 a near tie may fall either way; in float32 none does)"
