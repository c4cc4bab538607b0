"""
Writes a drafter as vLLM and TensorRT-LLM read it, and checks that the plain checkpoint drafts the same tokens:
`python examples/export_drafter.py`.

Engines draft in a plain causal pass, so a drafter for them needs causal block attention from its training on. The one
made here is not trained: train it as examples/train_drafter.py does, with `block_attention="causal"`.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from example_models import encode, load_target
from transformers import AutoModelForCausalLM

from d3d_hf import D3DDrafterForCausalLM
from d3d_hf.hub.parallel_draft import export_parallel_draft


MASK_TOKEN_ID = 16  # <empty_output> in SmolLM2's tokenizer: a token that no answer holds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny random models, to see that it runs")
    parser.add_argument("--output", default=None, help="where to write (default: a temporary folder)")
    args = parser.parse_args()

    target, tokenizer = load_target(args.tiny)
    drafter = D3DDrafterForCausalLM.from_backbone(
        target, block_size=4, kept_layers=2 if args.tiny else 12, block_attention="causal"
    )
    context = encode(tokenizer, "What is a prime number?")["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        folder = args.output or folder
        mask = export_parallel_draft(drafter, tokenizer, folder, mask_token_id=MASK_TOKEN_ID)
        config = json.loads((Path(folder) / "config.json").read_text())
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
    print(f"A {type(exported).__name__} of {config['num_hidden_layers']} layers, pard_token {config['pard_token']}")

    # What an engine does: masks after the text, and a draft token from the last token and from each mask.
    num_masks = drafter.config.block_size - 1
    masked = torch.cat([context, torch.full((1, num_masks), mask)], dim=1)
    with torch.no_grad():
        draft = exported(masked).logits[0, -num_masks - 1 :].argmax(-1)
    generated = target.generate(context, max_new_tokens=num_masks + 2, do_sample=False, assistant_model=drafter)
    print(f"Its draft: {tokenizer.decode(draft)!r}")
    print(f"The target goes on: {tokenizer.decode(generated[0, context.shape[1] :])!r}")


if __name__ == "__main__":
    main()
