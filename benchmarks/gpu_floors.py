"""
Bytes and arithmetic of packed passes on an H200, as the tables of docs/gpu.md:

    python benchmarks/gpu_floors.py
"""

from d3d_hf.cost_model.shapes import shape_config
from d3d_hf.kernels.floors import H200_BYTES_PER_S, H200_FLOPS_PER_S, attention_cost, pass_cost


BLOCK_SIZE = 8
CONTEXTS = (512, 8192)
SHAPES = (("qwen3-32b", None), ("qwen3-8b", None), ("qwen3-8b", 31), ("qwen3-1.7b", None))
# Tokens and rows with logits, the drafts being one block long.
PASSES = {
    "verification": (BLOCK_SIZE + 1, BLOCK_SIZE + 1),
    "synchronous draft": (2 * BLOCK_SIZE, BLOCK_SIZE),
    "packed, masked": ((BLOCK_SIZE + 1) ** 2, (BLOCK_SIZE + 1) ** 2),
    "packed, 3 guesses": ((BLOCK_SIZE + 1) * (1 + 4 * BLOCK_SIZE), (BLOCK_SIZE + 1) * (1 + 4 * BLOCK_SIZE)),
}


def bound_of(cost) -> str:
    return "memory" if cost.num_bytes / H200_BYTES_PER_S >= cost.num_flops / H200_FLOPS_PER_S else "arithmetic"


def pass_table() -> list[str]:
    lines = [
        "| Shape | Context | Pass | Tokens | GB | TFLOP | Floor, ms | Bound by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, num_layers in SHAPES:
        config = shape_config(name, num_layers)
        title = name if num_layers is None else f"{name}, {num_layers} layers"
        for context in CONTEXTS:
            for kind, (num_tokens, num_rows) in PASSES.items():
                cost = pass_cost(config, num_tokens, context, num_rows)
                amounts = f"{cost.num_bytes / 1e9:.2f} | {cost.num_flops / 1e12:.2f} | {cost.floor_ms():.2f}"
                lines.append(f"| {title} | {context:,} | {kind} | {num_tokens} | {amounts} | {bound_of(cost)} |")
    return lines


def attention_table() -> list[str]:
    lines = [
        "| Heads | Context | Pass | Rows | MB | GFLOP | Floor, µs | Bound by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for heads in (64, 32, 16):
        for context in CONTEXTS:
            for kind, (num_tokens, _) in PASSES.items():
                cost = attention_cost(heads, 8, 128, num_tokens, context)
                amounts = f"{cost.num_bytes / 1e6:.1f} | {cost.num_flops / 1e9:.2f} | {1e3 * cost.floor_ms():.1f}"
                rows = num_tokens * heads // 8
                lines.append(f"| {heads} / 8 | {context:,} | {kind} | {rows} | {amounts} | {bound_of(cost)} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*pass_table(), "", *attention_table()]))
