"""
What a packed pass must read and compute, and the time that this implies: the floor that measurements are judged by.

Counted are the weights, read once, the KV cache, read once, and what goes into a kernel and comes out of it; of the
arithmetic the matrix products, two operations for a multiplication with its addition. Left out are norms, RoPE,
activations between kernels, and the keys of the pass itself among the products: a floor may be too low, not too high.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig


# Measured on an H200: a copy of device memory, bytes read plus bytes written, and a large bfloat16 product.
H200_BYTES_PER_S = 4.3e12
H200_FLOPS_PER_S = 790e12


@dataclass(frozen=True)
class Cost:
    """
    Attributes:
        num_bytes (`int`): Read from and written to device memory.
        num_flops (`int`): Floating point operations of matrix products.
    """

    num_bytes: int
    num_flops: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.num_bytes * times, self.num_flops * times)

    def floor_ms(self, bytes_per_s: float = H200_BYTES_PER_S, flops_per_s: float = H200_FLOPS_PER_S) -> float:
        """Milliseconds, if memory and arithmetic are both busy all the time. The rates default to an H200's."""
        return 1e3 * max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


def attention_cost(
    num_heads: int, kv_heads: int, head_dim: int, num_tokens: int, num_cached: int, bytes_per_value: int = 2
) -> Cost:
    """One call of `packed_attention` without a window, batch size 1."""
    states = 2 * num_heads * num_tokens + 2 * kv_heads * (
        num_cached + num_tokens
    )  # rows of queries, outputs, keys, values
    return Cost(states * head_dim * bytes_per_value, 4 * num_heads * head_dim * num_tokens * num_cached)


def choice_cost(num_rows: int, vocab_size: int, bytes_per_value: int = 2) -> Cost:
    """One call of `choose_tokens`: the logits are read once."""
    return Cost(num_rows * vocab_size * bytes_per_value, 0)


def layer_cost(config: PreTrainedConfig, num_tokens: int, num_cached: int, bytes_per_value: int = 2) -> Cost:
    """
    One decoder layer with a gated MLP, attention included.

    Args:
        config (`PreTrainedConfig`): Shape of the model; a dense one.
        num_tokens (`int`): Of the pass.
        num_cached (`int`): Before it.
        bytes_per_value (`int`, *optional*, defaults to 2): Of weights and states.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    weights = config.hidden_size * (2 * heads + 2 * kv_heads) * head_dim  # queries, outputs; keys, values
    weights += 3 * config.hidden_size * config.intermediate_size
    maps = Cost(weights * bytes_per_value, 2 * weights * num_tokens)
    return maps + attention_cost(heads, kv_heads, head_dim, num_tokens, num_cached, bytes_per_value)


def head_cost(config: PreTrainedConfig, num_rows: int, bytes_per_value: int = 2) -> Cost:
    """The vocabulary projection of some rows, its logits written and read once by the choice."""
    weights = config.hidden_size * config.vocab_size
    maps = Cost((weights + num_rows * config.vocab_size) * bytes_per_value, 2 * weights * num_rows)
    return maps + choice_cost(num_rows, config.vocab_size, bytes_per_value)


def pass_cost(
    config: PreTrainedConfig, num_tokens: int, num_cached: int, num_rows: int, bytes_per_value: int = 2
) -> Cost:
    """A whole pass: every layer over all its tokens, and the head over `num_rows` of them."""
    layers = layer_cost(config, num_tokens, num_cached, bytes_per_value) * config.num_hidden_layers
    return layers + head_cost(config, num_rows, bytes_per_value)


__all__ = [
    "H200_BYTES_PER_S",
    "H200_FLOPS_PER_S",
    "Cost",
    "attention_cost",
    "choice_cost",
    "head_cost",
    "layer_cost",
    "pass_cost",
]
