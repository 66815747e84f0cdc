"""Times of a forward pass from sizes alone: bytes over bandwidth, FLOPs over peak, latencies.

    T = max(bytes / (tp * bandwidth * efficiency), flops / (tp * peak * efficiency))
        + layers * (launch + [tp > 1] * 2 * all_reduce)

A prediction for planning, labelled as one: it is within 10 % of the two published AR rates with the
constants below, and no promise elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What a forward pass reads: weights once, and each row's keys and values."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_weight: float = 2.0

    def kv_bytes(self, context: int) -> float:
        """Bytes of keys and values of one row of `context` tokens."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * context * 2.0


@dataclass(frozen=True)
class Machine:
    """One device: peak memory bandwidth (bytes/s), peak dense FLOP/s, and its latencies (s); link
    is one way between the target and a drafter elsewhere."""

    bandwidth: float
    flops: float
    efficiency: float = 0.9
    launch: float = 40e-6
    all_reduce: float = 20e-6
    link: float = 10e-6


BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int4": 0.5}
MODELS = {
    "llama-3.1-70b": ModelShape(70.6e9, 80, 8, 128),
    "llama-3.2-1b": ModelShape(1.24e9, 16, 8, 64),
    "qwen3-32b": ModelShape(32.8e9, 64, 8, 128),
    "qwen3-0.6b": ModelShape(0.6e9, 28, 8, 128),
}
MACHINES = {
    "h100": Machine(bandwidth=3.35e12, flops=989e12),
    "h200": Machine(bandwidth=4.8e12, flops=989e12),
    "a100": Machine(bandwidth=2.04e12, flops=312e12),
    "mi300x": Machine(bandwidth=5.3e12, flops=1307e12),
}


def forward_seconds(
    model: ModelShape,
    machine: Machine,
    rows: int,
    *,
    context: int = 1024,
    trunks: int = 1,
    tp: int = 1,
) -> float:
    """Time of one forward of `rows` tokens that read `trunks` KV caches of `context` tokens."""
    bytes_read = model.parameters * model.bytes_per_weight + trunks * model.kv_bytes(context)
    memory = bytes_read / (tp * machine.bandwidth * machine.efficiency)
    compute = 2.0 * model.parameters * rows / (tp * machine.flops * machine.efficiency)
    per_layer = machine.launch + (2.0 * machine.all_reduce if tp > 1 else 0.0)
    return max(memory, compute) + model.layers * per_layer
