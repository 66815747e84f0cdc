"""What a launch of the vocabulary kernels would compile, without a GPU; prints JSON.

    TRITON_INTERPRET=0 python tests/compiled.py

A process of its own: in the interpreter a kernel is no longer one. `addresses` stops the compiler
after the kernel's own IR; `binaries` asks Triton for the key under which a launch looks its binary
up, and launches nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

from saguaro_kernels import (
    Draft,
    Keys,
    Sampling,
    _launch,
    distribution,
    residual,
    row_stats,
    saguaro_sample,
    sampling,
    verification,
)
from saguaro_kernels.compat import chain_speculative_sampling
from saguaro_kernels.verification import verify

TARGET = GPUTarget("cuda", 90, 32)


# -- addresses ------------------------------------------------------------------------------------


class _Stop(Exception):
    pass


def kernel_ir(case: tuple[str, Any, dict, dict, int]) -> str:
    """Triton's IR of one compile case, after its own simplifications."""
    _, kernel, signature, constexprs, num_warps = case
    full = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    try:
        triton.compile(
            ASTSource(kernel, full, constexprs, {}), target=TARGET, options={"num_warps": num_warps}
        )
    except _Stop as stop:
        return str(stop)
    raise RuntimeError(f"{case[0]}: the compiler did not stop")


def _stop_after_ir() -> None:
    add_stages = CUDABackend.add_stages

    def add(self: Any, stages: dict, *rest: Any) -> None:
        add_stages(self, stages, *rest)
        make = stages["ttir"]

        def stop(module: Any, metadata: Any) -> None:
            raise _Stop(str(make(module, metadata)))

        stages["ttir"] = stop

    CUDABackend.add_stages = add
    triton.knobs.compilation.always_compile = True


def addresses() -> Iterator[dict[str, Any]]:
    """Per kernel: the widths of steps along the rows, and products of strides in 32 bits."""
    _stop_after_ir()
    seen = set()
    modules = (distribution, verification, sampling.geometric, residual_module())
    for case in itertools.chain.from_iterable(module.compile_cases() for module in modules):
        name, kernel, signature, _, _ = case
        # The variants with the most arguments.
        if kernel in seen or not re.search("all-options|filtered|geometric", name):
            continue
        seen.add(kernel)
        ir = kernel_ir(case)
        rows = r"(?:target|draft|logits|bias|draft_bias|row|probs)_ptr"
        yield {
            "kernel": kernel.fn.__name__,
            "steps": re.findall(rf"tt\.addptr %{rows}[^:\n]*: !tt\.ptr<\w+>, (i\d+)", ir),
            "narrow": re.findall(r"arith\.muli [^:\n]*%\w*stride\w*[^:\n]*: i32", ir),
            "atomics": re.findall(r"tt\.atomic_\w+ (\w+)", ir),
            "specialised": [
                parameter.name
                for parameter in kernel.params
                if not parameter.do_not_specialize
                and signature.get(parameter.name) in ("i32", "i64")
            ],
        }


def residual_module() -> Any:
    return __import__("saguaro_kernels.residual", fromlist=["compile_cases"])


# -- binaries -------------------------------------------------------------------------------------


class Binaries:
    """Stands in for the launcher: collects the keys of binaries, and where they would run."""

    current: torch.device | None = None

    def __init__(self) -> None:
        self.backend, self.binders = make_backend(TARGET), {}
        self.devices: set[str] = set()
        self.keys: dict[str, set[str]] = defaultdict(set)

    def run(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel not in self.binders:
            self.binders[kernel] = jit.create_function_from_signature(
                kernel.signature, kernel.params, self.backend
            )
        _, specialization, given = self.binders[kernel](*arguments, **options)
        self.keys[kernel.fn.__name__].add(f"{specialization} {given}")
        self.devices.add(str(Binaries.current))


@contextlib.contextmanager
def _make_current(device: torch.device) -> Iterator[None]:
    Binaries.current = device
    yield
    Binaries.current = None


def small(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones, wherever in memory a batch's slice may begin: not at a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    return torch.ones(count + 1, dtype=dtype)[1:].view(shape)


def ids(*shape: int) -> torch.Tensor:
    return small(*shape, dtype=torch.int64)


def rows(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def sampling_of(count: int, filtered: bool) -> Sampling:
    if not filtered:
        return Sampling(small(count))
    return Sampling(small(count), small(count, dtype=torch.int32), small(count), small(count))


def call_row_stats(B: int, K: int, V: int, filtered: bool) -> None:
    row_stats(rows(B * K, V), sampling_of(B * K, filtered), impl="triton")


def call_sample(B: int, K: int, V: int, filtered: bool) -> None:
    R = B * K
    saguaro_sample(
        rows(R, V), sampling_of(R, filtered), Keys(ids(R), ids(R)), offset=K, top_f=5 + K % 4,
        scale_f=K % 3, downweight=small(R), scheme="downweight", impl="triton",
    )  # fmt: skip


def call_residual(B: int, K: int, V: int, filtered: bool) -> None:
    sampling = sampling_of(B, filtered)
    residual(
        rows(B, V), rows(B, V), target_sampling=sampling, draft_sampling=sampling, impl="triton"
    )


def call_verify(rule: str) -> Callable[..., None]:
    def call(B: int, K: int, V: int, filtered: bool) -> None:
        draft = Draft(
            ids(B, K), small(B, dtype=torch.int32), rows(B, K, V), logq=small(B, K),
            cutoff=small(B, K), cutoff_id=ids(B, K), sampling=Sampling(small(B)),
        )  # fmt: skip
        verify(
            rows(B, K + 1, V), draft, sampling_of(B, filtered), Keys(ids(B), ids(B)), rule=rule,
            impl="triton",
        )  # fmt: skip

    return call


def call_chain(B: int, K: int, V: int, filtered: bool) -> None:
    chain_speculative_sampling(rows(B, K, V), ids(B, K), rows(B, K + 1, V), seed=1, impl="triton")


CALLS: dict[str, Callable[[int, int, int, bool], None]] = {
    "row_stats": call_row_stats,
    "saguaro_sample": call_sample,
    "residual": call_residual,
    "verify.token": call_verify("token"),
    "verify.block": call_verify("block"),
    "verify.coupled": call_verify("coupled"),
    "chain_speculative_sampling": call_chain,
}
BATCHES = (1, 2, 3, 5, 8, 13, 24, 64)
VOCABULARIES = {"aligned": (16, 1024, 8192), "unaligned": (15, 1001, 8193)}


def binaries() -> Iterator[dict[str, Any]]:
    """Per op and width class: how many binaries the shapes need, and how many a repeat adds."""
    _launch.INTERPRETED = True  # lets CPU tensors through to the launches that are not made
    for module in (distribution.launch, verification.launch, residual_module()):
        module.on_device = _make_current
    for op, filtered, (width, vocabularies) in itertools.product(
        CALLS, (False, True), VOCABULARIES.items()
    ):
        collected = Binaries()
        jit.JITFunction.run = lambda kernel, *a, c=collected, **o: c.run(kernel, *a, **o)
        for _ in range(2):
            before = sum(map(len, collected.keys.values()))
            for B, K, V in itertools.product(BATCHES, range(1, 9), vocabularies):
                CALLS[op](B, K, V, filtered)
        counts = {kernel: len(keys) for kernel, keys in collected.keys.items()}
        total = sum(counts.values())
        yield {
            "op": op, "filtered": filtered, "width": width, "kernels": counts, "total": total,
            "added": total - before, "devices": sorted(collected.devices),
        }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({"addresses": list(addresses()), "binaries": list(binaries())}))
