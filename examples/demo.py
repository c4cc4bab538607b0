"""Answers a few questions with and without a drafter and compares the two: `python examples/demo.py --help`."""

import argparse
import copy
import itertools
import time
from pathlib import Path

import torch

import d3d_hf
from d3d_hf import embedded


PROMPTS = (
    "What is 17 times 23? Think step by step.",
    "Explain in three sentences why the sky is blue.",
)
SHIPPED_DRAFTER = Path(__file__).resolve().parent.parent / "hub_cards" / "d3d-smollm2-135m"
BAR_WIDTH = 40


def main():
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"Loading {embedded.TARGET_NAME} (the first run converts it, about 20 seconds) ...", flush=True)
    target, tokenizer = embedded.load_target(dtype=args.dtype)
    target = target.to(device)
    drafter, about_drafter = load_drafter(target)
    print(f"Target and drafter: {target.dtype}, on {device}.\nDrafter: {about_drafter}\n")

    compiled = None
    if device == "cpu" and not args.no_compile:
        print("Compiling a layer of each (some seconds, less once Inductor's cache is warm) ...\n", flush=True)
        max_context = 256 + args.max_new_tokens
        drafter.warmup(max_context)
        compiled = d3d_hf.compile_target(copy.deepcopy(target), draft_lengths=(8,), max_context=max_context)

    question = encode(tokenizer, PROMPTS[0], device)
    for model, assistant in itertools.product(filter(None, (target, compiled)), (None, drafter)):
        generate(model, question, max_new_tokens=8, assistant_model=assistant)  # warm-up

    for prompt in args.prompt or PROMPTS:
        inputs = encode(tokenizer, prompt, device)
        plain_ids, plain_s = generate(target, inputs, args.max_new_tokens)
        drafted_ids, drafted_s = generate(target, inputs, args.max_new_tokens, assistant_model=drafter)
        print(f"> {prompt}\n{tokenizer.decode(drafted_ids, skip_special_tokens=True)}\n")
        print(f"  Identical ids:    {compare(target, tokenizer, inputs['input_ids'][0], plain_ids, drafted_ids)}")
        print(f"  Without drafter:  {len(plain_ids) / plain_s:6.1f} tokens/s ({len(plain_ids)} tokens)")
        print(f"  With drafter:     {len(drafted_ids) / drafted_s:6.1f} tokens/s ({len(drafted_ids)} tokens)")
        if compiled is not None:
            for name, assistant in (("Compiled, without:", None), ("Compiled, with:", drafter)):
                ids, seconds = generate(compiled, inputs, args.max_new_tokens, assistant_model=assistant)
                print(f"  {name:17} {len(ids) / seconds:6.1f} tokens/s ({len(ids)} tokens)")
        print_stats(drafter.last_generation_stats, block_size=drafter.config.block_size)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--no-compile", action="store_true", help="on the CPU: leave everything eager")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto is bfloat16")
    args = parser.parse_args()
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {args.max_new_tokens}: give at least 1")
    return args


def load_drafter(target):
    """The trained drafter where the repository ships one, else the target's own layers, and a line about it."""
    if SHIPPED_DRAFTER.is_dir():
        drafter = d3d_hf.D3DDrafterForCausalLM.from_pretrained(SHIPPED_DRAFTER, dtype=target.dtype).to(target.device)
        return drafter.eval(), f"{SHIPPED_DRAFTER.name}, trained for this target."
    drafter = d3d_hf.D3DDrafterForCausalLM.from_backbone(target, block_size=8).eval()
    return drafter, (
        "the target's own layers, untrained as a denoiser. Its first draft token is right, the ones from mask slots\n"
        "are mostly wrong: about 2.1 tokens per round. As it costs as much as the target itself, this run shows the\n"
        "mechanism, not a speed-up."
    )


def encode(tokenizer, prompt: str, device: str):
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return inputs.to(device)


def generate(target, inputs, max_new_tokens: int, assistant_model=None) -> tuple[torch.Tensor, float]:
    """The new token ids, on the CPU, and the seconds that they took."""
    start = time.perf_counter()
    ids = target.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, assistant_model=assistant_model
    ).cpu()
    return ids[0, inputs["input_ids"].shape[1] :], time.perf_counter() - start


def compare(target, tokenizer, prompt_ids: torch.Tensor, plain_ids: torch.Tensor, drafted_ids: torch.Tensor) -> str:
    """Whether two answers are the same, and if not, whether they part at a tie within the dtype's rounding."""
    if torch.equal(plain_ids, drafted_ids):
        return f"yes, all {len(plain_ids)} tokens"
    common = min(len(plain_ids), len(drafted_ids))
    differing = (plain_ids[:common] != drafted_ids[:common]).nonzero()
    if len(differing) == 0:
        return f"NO: one answer ends after {common} tokens and the other goes on. That is a bug; please report it."
    first = int(differing[0])
    plain_id, drafted_id = int(plain_ids[first]), int(drafted_ids[first])
    prefix = torch.cat([prompt_ids, plain_ids[:first].to(prompt_ids.device)])[None]  # (1, length)
    gap, noise = logit_gap(target, prefix, plain_id, drafted_id)
    texts = f"{tokenizer.decode([plain_id])!r} or {tokenizer.decode([drafted_id])!r}"
    figures = (
        f"exactly computed, their logits are {gap:.3f} apart, and {target.dtype} moves logits by up to {noise:.3f}"
    )
    if gap <= 2 * noise:
        return f"up to token {first + 1}, then a rounding tie:\n    {texts}; {figures}"
    return f"NO, they part at token {first + 1}:\n    {texts}; {figures}. That is a bug; please report it."


@torch.no_grad()
def logit_gap(target, prefix: torch.Tensor, token_id: int, other_id: int) -> tuple[float, float]:
    """
    How far apart the next-token logits of two tokens are after `prefix`, shape (1, length), in the next wider dtype,
    and by how much the target's own dtype moves any of the 50 largest logits there.
    """
    wider = copy.deepcopy(target).to(torch.float64 if target.dtype == torch.float32 else torch.float32)
    exact = wider(prefix).logits[0, -1]  # (vocab_size,)
    largest = exact.topk(50).indices
    noise = (target(prefix).logits[0, -1] - exact)[largest].abs().max()
    return float((exact[token_id] - exact[other_id]).abs()), float(noise)


def print_stats(stats, block_size: int):
    rounds = max(stats.num_rounds, 1)
    print(
        f"  Tokens per round: {stats.tokens_per_round:6.2f} ({stats.num_tokens} tokens in {stats.num_rounds} rounds)"
    )
    print(
        f"  A round takes:    {stats.draft_ms / rounds:6.1f} ms to draft, {stats.verify_ms / rounds:.1f} ms to verify"
    )
    print("  Rounds by number of accepted draft tokens:")
    most = max(stats.num_accepted.values(), default=1)
    for num_accepted in range(max(block_size, *stats.num_accepted, 0) + 1):
        count = stats.num_accepted.get(num_accepted, 0)
        print(f"    {num_accepted:2d} |{'#' * -(-BAR_WIDTH * count // most)} {count}")
    print()


if __name__ == "__main__":
    main()
