"""Export to the layout of serving engines, and import of published parallel drafters."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.cli import main
from d3d_hf.hub.parallel_draft import check_same_tokens, export_parallel_draft, import_parallel_draft
from d3d_hf.model.drafting_session import DraftingSession
from d3d_hf.testing import ForwardCounter, tiny_model, tiny_tokenizer
from lossless import generate, prompt_of


BLOCK_SIZE = 5
CONTEXTS = [prompt_of(length, seed)[0] % 50 + 2 for length, seed in ((1, 0), (9, 1), (23, 2))]


def perturbed(drafter):
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return drafter


def causal_drafter(architecture="qwen3", vocab_size=None, mask_token_id=None, chained_head_size=None, **model_kwargs):
    return perturbed(
        D3DDrafterForCausalLM.from_backbone(
            tiny_model(architecture, seed=3, **model_kwargs),
            block_size=BLOCK_SIZE,
            block_attention="causal",
            vocab_size=vocab_size,
            mask_token_id=mask_token_id,
            chained_head_size=chained_head_size,
            target_name_or_path="org/target",
        )
    )


def drafts_of(drafter, mask_token_id):
    """The token that is the exported drafter's mask is never drafted."""
    drafts = []
    for context in CONTEXTS:
        session = DraftingSession(drafter, drafter.config.vocab_size)
        session.reader._never_drafted = (mask_token_id,)
        drafts.append(session.draft(context, BLOCK_SIZE).tolist())
    return drafts


@torch.no_grad()
def engine_drafts(folder):
    """What an engine does: masks after the text, one causal pass, the likeliest token of each of the last rows."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    masks = torch.full((BLOCK_SIZE - 1,), model.config.pard_token)
    logits = [model(torch.cat([context, masks])[None]).logits[0, -BLOCK_SIZE:] for context in CONTEXTS]
    return model, logits


@pytest.mark.parametrize(
    "kwargs, num_tokens, mask",
    [
        ({"tie_word_embeddings": True}, 60, 66),
        ({"architecture": "llama"}, 66, 66),
        ({"mask_token_id": 5}, 65, 5),
        ({"mask_token_id": 70, "model_vocab": 71, "vocab_size": 67}, 60, 66),  # a mask beyond the target's vocabulary
        ({"model_vocab": 61, "vocab_size": 64, "tie_word_embeddings": True}, 60, 63),  # fewer rows than the target
    ],
    ids=["tied", "untied", "existing-token", "extra-rows", "missing-rows"],
)
def test_round_trip(kwargs, num_tokens, mask, tmp_path):
    kwargs = dict(kwargs)
    if "model_vocab" in kwargs:
        size = kwargs.pop("model_vocab")
        drafter = perturbed(
            D3DDrafterForCausalLM.from_backbone(
                tiny_model(
                    "qwen3", seed=3, vocab_size=size, tie_word_embeddings=kwargs.pop("tie_word_embeddings", False)
                ),
                block_size=BLOCK_SIZE,
                block_attention="causal",
                **kwargs,
            )
        )
    else:
        drafter = causal_drafter(**kwargs)
    state = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert export_parallel_draft(drafter, tiny_tokenizer(num_tokens), tmp_path) == mask
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items()), "it is not changed"

    expected = drafts_of(drafter, mask)
    model, logits = engine_drafts(tmp_path)
    assert model.config.vocab_size == drafter.config.vocab_size == model.lm_head.weight.shape[0]
    assert [rows.argmax(-1).tolist() for rows in logits] == expected
    again = import_parallel_draft(tmp_path)
    assert drafts_of(again, mask) == expected
    assert (again.config.block_size, again.config.mask_token_id) == (BLOCK_SIZE, mask)
    assert again.config.target_name_or_path == drafter.config.target_name_or_path
    assert str(tmp_path) not in again.config.to_json_string()


def test_the_mask_cannot_be_drafted(tmp_path):
    """Its embedding would win as a row of a tied head: here it points where the hidden states do."""
    drafter = causal_drafter("llama", tie_word_embeddings=True)
    with torch.no_grad():
        hidden = drafter.model(CONTEXTS[2][None]).last_hidden_state[0, -1]
        drafter.mask_embedding.weight.copy_(100 * hidden[None])
    export_parallel_draft(drafter, tiny_tokenizer(60), tmp_path)
    model, logits = engine_drafts(tmp_path)
    assert (model.model.embed_tokens.weight[66] @ hidden > model.lm_head.weight @ hidden).all()
    for rows in logits:
        torch.testing.assert_close(rows[:, 66], rows[:, :66].mean(-1), atol=1e-3, rtol=1e-3)


def test_a_chained_head_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drafter = causal_drafter(chained_head_size=8)
    with_head = drafts_of(drafter, 66)
    drafter.save_pretrained("drafter")
    tiny_tokenizer(60).save_pretrained("drafter")
    assert main(["export", "--drafter", "drafter", "--output", "exported"]) == 0
    output = capsys.readouterr()
    assert "chained head is left out" in output.err and "token 66 stands in mask slots" in output.out
    drafter.chained_head = None
    without_head = drafts_of(drafter, 66)
    assert [rows.argmax(-1).tolist() for rows in engine_drafts("exported")[1]] == without_head != with_head


def test_what_engines_read(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
    drafter = causal_drafter("llama", rope_parameters=rope, max_position_embeddings=128)
    export_parallel_draft(drafter, tiny_tokenizer(60), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert (config["pard_token"], config["block_size"], config["tie_word_embeddings"]) == (66, BLOCK_SIZE, False)
    assert config["rope_theta"] == 5e4 and config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {p.name for p in tmp_path.iterdir()}
    assert not list(tmp_path.glob("*.py")), "no code of ours"
    model, logits = engine_drafts(tmp_path)
    assert model.config.rope_parameters == drafter.config.backbone_config.rope_parameters == rope
    assert [rows.argmax(-1).tolist() for rows in logits] == drafts_of(drafter, 66)


def test_commands_round_trip_and_draft(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = tiny_model("qwen3", seed=3)
    target.save_pretrained("target")
    tiny_tokenizer(60).save_pretrained("target")
    drafter = D3DDrafterForCausalLM.from_backbone(target, block_size=BLOCK_SIZE, block_attention="causal")
    with torch.no_grad():
        drafter.mask_embedding.weight.add_(0.1 * torch.randn_like(drafter.mask_embedding.weight))
    drafter.save_pretrained("drafter")
    assert main(["export", "--drafter", "drafter", "--tokenizer", "target", "--output", "exported"]) == 0
    assert main(["import", "--from", "exported", "--target", "target", "--output", "imported"]) == 0, (
        capsys.readouterr()
    )
    imported = D3DDrafterForCausalLM.from_pretrained("imported")
    assert drafts_of(imported, 66) == drafts_of(drafter, 66)
    reference = generate(target, prompt_of())
    with ForwardCounter(target) as forwards:
        assert torch.equal(generate(target, prompt_of(), imported), reference)
    assert forwards.count < 28, "the first draft token is the target's own, unless that is the mask"


def fails(capsys, *argv):
    capsys.readouterr()
    assert main(list(argv)) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    return line


def test_refusals(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    D3DDrafterForCausalLM.from_backbone(tiny_model("qwen3")).save_pretrained("bidirectional")
    causal_drafter("gemma3").save_pretrained("gemma3")
    causal_drafter().save_pretrained("causal")
    tiny_tokenizer(64).save_pretrained("tokenizer")
    other = tiny_tokenizer(64)
    other.add_tokens(["<more>", "<and>", "<more-still>"])
    other.save_pretrained("full")

    def export(drafter, tokenizer, *argv):
        return fails(capsys, "export", "--drafter", drafter, "--tokenizer", tokenizer, "--output", "out", *argv)

    assert "block attention is 'bidirectional'" in export("bidirectional", "tokenizer")
    assert "architecture is 'gemma3_text'" in export("gemma3", "tokenizer")
    assert "uses all 67 rows" in export("causal", "full")
    assert "mask token is 67: give an id from 0 to 66" in export("causal", "full", "--mask-token-id", "67")
    assert "without a tokenizer" in fails(capsys, "export", "--drafter", "causal", "--output", "out")
    assert "exists already" in fails(capsys, "export", "--drafter", "causal", "--output", "causal")
    assert not (tmp_path / "out").exists(), "nothing is written"
    assert (
        main(["export", "--drafter", "causal", "--tokenizer", "full", "--output", "out", "--mask-token-id", "66"]) == 0
    )

    tiny_model("qwen3", seed=3).save_pretrained("plain")
    tiny_tokenizer(64).save_pretrained("plain")
    tiny_model("llama", vocab_size=64).save_pretrained("target")
    swapped = tiny_tokenizer(63)
    swapped.add_tokens(["<else>"])
    swapped.save_pretrained("target")

    def load(*argv):
        return fails(capsys, "import", "--from", "plain", "--output", "out2", *argv)

    assert "names 0 mask tokens" in load("--block-size", "5")
    assert "names no block_size" in load("--mask-token-id", "66")
    assert "mask_token_id is 67" in load("--block-size", "5", "--mask-token-id", "67")
    assert "1 tokens of the target have another id" in load(
        "--block-size", "5", "--mask-token-id", "66", "--target", "target"
    )
    assert "is a D3D drafter already" in fails(capsys, "import", "--from", "causal", "--output", "out2")
    assert "config says [66]" in fails(capsys, "import", "--from", "out", "--output", "out2", "--mask-token-id", "3")
    assert not (tmp_path / "out2").exists()


def test_a_published_drafter_may_know_a_mask_token_more():
    own, target = tiny_tokenizer(64), tiny_tokenizer(64)
    own.add_tokens(["<mask>"])
    check_same_tokens(own, target)
    with pytest.raises(ValueError, match="1 tokens of the target.*'<mask>'"):
        check_same_tokens(target, own)
    check_same_tokens(target, own, unused={64})
