"""How long a forward takes against its tokens: from the shape of a model and a device, or from measured times."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedConfig

from .hardware import Hardware


@dataclass(frozen=True)
class Demand:
    """
    What one forward needs.

    Attributes:
        alone_ms (`float`): Time with the device to itself.
        memory_ms (`float`): Time for which it would keep the memory busy at full bandwidth, at most `alone_ms`.
        compute_ms (`float`): Time for which it would keep the arithmetic units busy, at most `alone_ms`.
    """

    alone_ms: float
    memory_ms: float
    compute_ms: float


@dataclass(frozen=True)
class RooflineForward:
    """
    Forward of a dense decoder with gated MLPs on one device: the longer of what it reads and what it computes, plus a
    latency for each layer. It reads its weights once, the KV cache of every sequence, and the vocabulary matrix where
    logits are asked for; activations are not counted, nor the arithmetic of norms.

    Args:
        config (`PreTrainedConfig`): Shape of the model; a text config.
        hardware ([`Hardware`]): The device.
        context (`int`, *optional*, defaults to 1024): Tokens in the KV cache of each sequence.
        batch_size (`int`, *optional*, defaults to 1): Sequences.
        num_layers (`int`, *optional*): Layers, by default the config's.
        bytes_per_value (`float`, *optional*, defaults to 2): Of weights and KV cache.

    Raises:
        ValueError: A mixture of experts, or a number that is out of range.
    """

    config: PreTrainedConfig
    hardware: Hardware
    context: int = 1024
    batch_size: int = 1
    num_layers: int | None = None
    bytes_per_value: float = 2.0

    def __post_init__(self):
        if any(getattr(self.config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ValueError(
                f"{self.config.model_type} is a mixture of experts, whose reads hang on the tokens: give measured "
                f"times instead of hardware."
            )
        if self.num_layers is None:
            object.__setattr__(self, "num_layers", self.config.num_hidden_layers)
        for name, least in (("context", 0), ("batch_size", 1), ("num_layers", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}.")

    @property
    def _attention_width(self) -> int:
        return self.config.num_attention_heads * self._head_dim

    @property
    def _head_dim(self) -> int:
        config = self.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's linear maps."""
        config = self.config
        kv_width = config.num_key_value_heads * self._head_dim
        attention = config.hidden_size * (2 * self._attention_width + 2 * kv_width)
        return attention + 3 * config.hidden_size * config.intermediate_size

    @property
    def head_weights(self) -> int:
        """Weights of the vocabulary projection."""
        return self.config.vocab_size * self.config.hidden_size

    def num_bytes(self, num_logits: int) -> float:
        """Bytes that one forward reads."""
        values_per_token = 2 * self.config.num_key_value_heads * self._head_dim
        cached = self.batch_size * self.context * values_per_token
        values = self.num_layers * (self.layer_weights + cached) + (self.head_weights if num_logits else 0)
        return self.bytes_per_value * values

    def num_flops(self, num_tokens: int, num_logits: int) -> float:
        """Floating point operations of one forward, attention over the context included."""
        per_token = 2 * self.layer_weights + 4 * self.context * self._attention_width
        return self.batch_size * (num_tokens * self.num_layers * per_token + 2 * num_logits * self.head_weights)

    def demand(self, num_tokens: int, num_logits: int) -> Demand:
        """
        Args:
            num_tokens (`int`): Tokens of each sequence.
            num_logits (`int`): Of them, those whose logits are computed.
        """
        memory_ms = 1e3 * self.num_bytes(num_logits) / self.hardware.bandwidth
        compute_ms = 1e3 * self.num_flops(num_tokens, num_logits) / self.hardware.flops
        latency_ms = self.num_layers * self.hardware.layer_latency_ms
        return Demand(max(memory_ms, compute_ms) + latency_ms, memory_ms, compute_ms)


@dataclass(frozen=True)
class MeasuredForward:
    """
    A forward as it was measured: times between two measured ones lie on a straight line, those beyond the last go on
    with the last slope, and those below the first stay there. For sharing a device, the time at the fewest tokens is
    taken as the memory's, and the largest throughput seen as the peak of arithmetic.

    Args:
        forward_ms (mapping of `int` to `float`): Milliseconds for each number of tokens, of at least two.

    Raises:
        ValueError: Fewer than two times, or one that is not positive.
    """

    forward_ms: Mapping[int, float]

    def __post_init__(self):
        times = {int(tokens): float(ms) for tokens, ms in sorted(self.forward_ms.items(), key=lambda x: int(x[0]))}
        if len(times) < 2 or min(times) < 1 or not all(0 < ms < math.inf for ms in times.values()):
            raise ValueError(
                f"forward_ms is {dict(self.forward_ms)}: give milliseconds above 0 for at least two numbers of tokens."
            )
        object.__setattr__(self, "forward_ms", times)

    def alone_ms(self, num_tokens: float) -> float:
        """Milliseconds of a forward of so many tokens."""
        counts, times = list(self.forward_ms), list(self.forward_ms.values())
        if num_tokens <= counts[0]:
            return times[0]
        right = min(bisect.bisect_left(counts, num_tokens), len(counts) - 1)
        slope = (times[right] - times[right - 1]) / (counts[right] - counts[right - 1])
        return max(times[right] + slope * (num_tokens - counts[right]), min(times))

    def demand(self, num_tokens: int, num_logits: int) -> Demand:
        """As [`RooflineForward.demand`]; logits are in the measured times, as many as there were."""
        alone_ms = self.alone_ms(num_tokens)
        fastest = min(ms / tokens for tokens, ms in self.forward_ms.items())  # milliseconds a token
        memory_ms = min(next(iter(self.forward_ms.values())), alone_ms)
        return Demand(alone_ms, memory_ms, min(fastest * num_tokens, alone_ms))


def with_layers_between(measured: Mapping[int, MeasuredForward], num_layers: int) -> MeasuredForward:
    """
    The forward of a depth that was not measured, on a straight line through the two measured depths around it, or the
    two nearest.

    Raises:
        ValueError: One depth alone was measured, and another is asked for; or depths at different numbers of tokens.
    """
    if num_layers in measured:
        return measured[num_layers]
    depths = sorted(measured)
    if len(depths) < 2:
        raise ValueError(f"Times of {num_layers} layers are asked for, of {depths} measured: measure two depths.")
    right = min(max(bisect.bisect_left(depths, num_layers), 1), len(depths) - 1)
    low, high = depths[right - 1], depths[right]
    counts = [set(measured[depth].forward_ms) for depth in (low, high)]
    if counts[0] != counts[1]:
        raise ValueError(f"The times of {low} and {high} layers are of different numbers of tokens: give the same.")
    share = (num_layers - low) / (high - low)
    return MeasuredForward(
        {
            tokens: ms + share * (measured[high].forward_ms[tokens] - ms)
            for tokens, ms in measured[low].forward_ms.items()
        }
    )


__all__ = ["Demand", "MeasuredForward", "RooflineForward", "with_layers_between"]
