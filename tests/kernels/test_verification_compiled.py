"""What the compiler makes of the verification kernels; a process of its own, not interpreted.

Registers, spills and load widths of every kernel on every target: `python -m bench compile`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import re
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from saguaro_kernels import residual, verification

seen = set()
for module in (verification, __import__("saguaro_kernels.residual", fromlist=["x"])):
    for name, kernel, signature, constexprs, warps in module.compile_cases():
        # B, K, V and the strides are never specialised on: no new binary when they change.
        integers = {a for a, kind in signature.items() if kind in ("i32", "i64")}
        fixed = {p.name for p in kernel.params if p.do_not_specialize}
        assert integers <= fixed, (name, integers - fixed)
        assert set(signature) | set(constexprs) == set(kernel.arg_names), name
        if kernel in seen or "all-options" not in name and "filtered" not in name:
            continue
        seen.add(kernel)
        full = {a: signature.get(a, "constexpr") for a in kernel.arg_names}
        source = ASTSource(kernel, full, constexprs, {})
        ir = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        # Rows are addressed in 64 bits: a scalar step along the logits is never an i32.
        steps = re.findall(r"tt.addptr %(?:target|draft)_ptr[^:]*: !tt.ptr<bf16>, (i\\d+)",
                           ir.asm["ttir"])
        assert steps and set(steps) == {"i64"}, (name, steps)
print(len(seen), "kernels")
"""


def test_int64_addresses_and_few_binaries() -> None:
    """Faults 14 and 21."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["5", "kernels"]
