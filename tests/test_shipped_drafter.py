"""The drafter in hub_cards/: small enough, described, and better than the target's own layers."""

from pathlib import Path

import torch
from huggingface_hub import ModelCard

from d3d_hf import D3DDrafterForCausalLM, embedded


FOLDER = Path(__file__).resolve().parent.parent / "hub_cards" / "d3d-smollm2-135m"
QUESTION = "A farmer has 12 boxes with 8 eggs each and sells 30 eggs. How many eggs are left?"


def test_files_and_card():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 50e6
    card = ModelCard.load(FOLDER / "README.md")
    assert card.data.base_model == embedded.TARGET_NAME and card.data.license == "apache-2.0"


def test_it_drafts_well_for_its_target(embedded_target):
    target, tokenizer = embedded_target
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    rounds = {}
    for name, drafter in (
        ("loaded", D3DDrafterForCausalLM.from_pretrained(FOLDER, dtype="auto")),
        ("shared", D3DDrafterForCausalLM.from_target(target, adapter=FOLDER)),
    ):
        assert drafter.dtype == torch.bfloat16
        target.generate(**inputs, max_new_tokens=48, do_sample=False, assistant_model=drafter)
        rounds[name] = drafter.last_generation_stats.tokens_per_round
    assert min(rounds.values()) > 2.3, rounds  # the untrained one gets 2.1
