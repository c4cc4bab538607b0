"""
What a device can do: bandwidth and arithmetic, as far as a decoder's forward gets to use them.

Sources of the peaks, 16-bit floats with 32-bit accumulation and without sparsity:

| Device | Bandwidth | Arithmetic | Source |
|---|---|---|---|
| H200 SXM | 4.8 TB/s | 989 TFLOP/s | NVIDIA H200 data sheet |
| H100 SXM | 3.35 TB/s | 989 TFLOP/s | NVIDIA H100 data sheet |
| A100 SXM 80 GB | 2.039 TB/s | 312 TFLOP/s | NVIDIA A100 data sheet |
| RTX 4090 | 1.008 TB/s | 165.2 TFLOP/s | NVIDIA Ada architecture white paper |

On an H200 a copy reached 4.3 TB/s and a large bfloat16 product 790 TFLOP/s, 0.9 and 0.8 of the peaks; the same shares
are assumed of the other GPUs. A forward is taken to lose 5 microseconds a layer between kernels, replayed as a CUDA
graph: an assumption too. `cpu-2-cores` is the machine of docs/lab-notes.md, by its own figures: two cores of an AMD
EPYC (Zen 4); one token through the compiled 135M target, 269 MB of weights, took 24 to 26 ms, and 81 tokens through
its layers 52 ms.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """
    Attributes:
        name (`str`): As on the command line.
        peak_bandwidth (`float`): Bytes per second.
        peak_flops (`float`): Floating point operations per second, two for a multiplication with its addition.
        bandwidth_efficiency, flops_efficiency (`float`): Shares of the peaks that a forward reaches.
        layer_latency_ms (`float`): Of each layer, whatever it computes; it uses neither bandwidth nor arithmetic.
    """

    name: str
    peak_bandwidth: float
    peak_flops: float
    bandwidth_efficiency: float = 0.9
    flops_efficiency: float = 0.8
    layer_latency_ms: float = 0.005

    @property
    def bandwidth(self) -> float:
        """Bytes per second within reach."""
        return self.peak_bandwidth * self.bandwidth_efficiency

    @property
    def flops(self) -> float:
        """Floating point operations per second within reach."""
        return self.peak_flops * self.flops_efficiency


HARDWARE = {
    device.name: device
    for device in (
        Hardware("h200", 4.8e12, 989e12),
        Hardware("h100", 3.35e12, 989e12),
        Hardware("a100", 2.039e12, 312e12),
        Hardware("rtx4090", 1.008e12, 165.2e12),
        Hardware("cpu-2-cores", 10.8e9, 350e9, 1.0, 1.0, 0.0),
    )
}


__all__ = ["HARDWARE", "Hardware"]
