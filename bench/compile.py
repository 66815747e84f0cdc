"""Ahead-of-time binaries of every kernel, without a GPU: do they compile, and what do they use?

Each kernel module lists its binaries: `compile_cases()` returns tuples of name, kernel, signature
{argument: type}, constexprs {argument: value} and num_warps. They are compiled for sm_80, sm_90,
sm_100 and gfx942, and read back from the binary: registers, shared memory, spills (local memory),
the widest global load and the tensor-core instructions. A failed compile is a failure, and so is a
spill, but for those of KNOWN_SPILLS; on sm_90, for which the tile sizes are chosen, there are none.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import files

PACKAGE = "saguaro_kernels"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
TUNED = "sm_90"
KNOWN_SPILLS: dict[str, dict[tuple[str, str], str]] = {
    "3.7": {
        ("predict_outcomes_scan-probability-bf16", "sm_100"): "8 warps spill on sm_80 instead",
        ("predict_outcomes_scan-auto-bf16-ids", "sm_100"): "8 warps, for all rankings, likewise",
    },
    "3.6": {
        ("row_scan_kernel-plain-bf16", "sm_100"): "80 of 255 registers, ptxas's choice",
        ("tree_attention-tree-M24-G8-D128-bf16", "sm_100"): "4 warps spill 1128",
        ("tree_attention-prefill-G4-D128-bf16", "sm_80"): "2 stages spill 24, 4 warps 504",
    },
}
"""By triton's version, (name, target) of binaries that may spill a few bytes, and why no other
launch is better."""
_TENSOR_CORE = r"\b(?:HMMA|HGMMA|IMMA|QGMMA|DMMA|OMMA|UTC\w*MMA)\b|\bv_mfma"


@dataclass(frozen=True)
class Binary:
    """One kernel variant for one target; `error` is empty when it compiled."""

    name: str
    target: str
    registers: int = 0
    shared_bytes: int = 0
    spill_bytes: int = 0
    load_bits: int = 0
    tensor_core: int = 0
    error: str = ""

    @property
    def failed(self) -> bool:
        """True when it did not compile, or spills and is not known to."""
        return bool(self.error) or (self.spill_bytes > 0 and not self.known)

    @property
    def known(self) -> str:
        """Why it may spill; empty when it may not."""
        minor = ".".join(version("triton").split(".")[:2])
        return KNOWN_SPILLS.get(minor, {}).get((self.name, self.target), "")


def discover(package: str = PACKAGE) -> Iterator[tuple[str, Any, dict, dict, int]]:
    """Yield the compile cases of every module of `package` that lists some."""
    root = importlib.import_module(package)
    modules = [package]
    if hasattr(root, "__path__"):
        modules += [info.name for info in pkgutil.walk_packages(root.__path__, f"{package}.")]
    seen = set()
    for module in modules:
        # A folder's __init__ and the file it re-exports from list the same cases.
        for case in getattr(importlib.import_module(module), "compile_cases", list)():
            if case[0] not in seen:
                seen.add(case[0])
                yield case


def compile_case(case: tuple[str, Any, dict, dict, int], target: str) -> Binary:
    """Compile one case for one target and read its binary."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    name, kernel, signature, constexprs, num_warps = case
    machine = (
        GPUTarget("hip", target, 64)
        if target.startswith("gfx")
        else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    )
    # What a launch with torch's tensors finds out about its pointers: they are 16-byte aligned.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, parameter in enumerate(kernel.params)
        if str(signature.get(parameter.name, "")).startswith("*")
        and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    }
    # Arguments that the case does not name are the constexprs.
    full = {a: signature.get(a, "constexpr") for a in kernel.arg_names}
    try:
        source = ASTSource(kernel, full, constexprs, attributes)
        built = triton_compile(source, target=machine, options={"num_warps": num_warps})
    except Exception as error:  # noqa: BLE001  any failure of the compiler is the result
        reason = str(error).strip().splitlines() or [repr(error)]
        return Binary(name, target, error=f"{type(error).__name__}: {reason[-1]}"[:300])
    read = _read_amdgcn if machine.backend == "hip" else _read_cubin
    return Binary(name, target, shared_bytes=built.metadata.shared, **read(built.asm))


def _tool(name: str) -> str:
    from triton.backends import nvidia

    return str(Path(next(iter(nvidia.__path__)), "bin", name))


def _read_cubin(asm: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        usage = _run(_tool("cuobjdump"), "-res-usage", str(cubin))
        sass = _run(_tool("nvdisasm"), "-c", str(cubin))
    number = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    # STL writes local memory: ptxas reports some spills only as stack.
    spilled = bool(re.search(r"\bSTL\b", sass))
    return {
        "registers": number.get("REG", 0),
        "spill_bytes": number.get("LOCAL", 0) + (max(number.get("STACK", 0), 1) if spilled else 0),
        "load_bits": _widest_load(sass),
        "tensor_core": len(re.findall(_TENSOR_CORE, sass)),
    }


def _widest_load(sass: str) -> int:
    """Bits per thread of the widest global load, asynchronous copies to shared memory included."""
    widest = 0
    for suffix in re.findall(r"\b(?:LDG|LDGSTS)\.([\w.]+)", sass):
        parts = suffix.split(".")
        sizes = {"256": 256, "128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
        widest = max(widest, next((sizes[p] for p in parts if p in sizes), 32))
    return widest


def _read_amdgcn(asm: dict[str, Any]) -> dict[str, Any]:
    text = asm["amdgcn"]

    def metadata(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    loads = re.findall(r"\b(?:global|buffer|flat)_load_(dwordx[234]|dword|u?short|[us]byte)", text)
    bits = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "ushort": 16}
    return {
        "registers": metadata("vgpr_count"),
        "spill_bytes": 4 * metadata("vgpr_spill_count"),
        "load_bits": max((bits.get(load, 8) for load in loads), default=0),
        "tensor_core": len(re.findall(_TENSOR_CORE, text)),
    }


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_all(
    package: str = PACKAGE,
    pattern: str = "",
    targets: Sequence[str] = TARGETS,
    *,
    first: bool = False,
    jobs: int = 1,
) -> list[Binary]:
    """Compile the cases whose name matches `pattern`, in `jobs` processes; in the cases' order.

    `first` keeps one case of each kernel.
    """
    cases = [case for case in discover(package) if re.search(pattern, case[0])]
    if first:
        cases = list({case[1].__name__: case for case in reversed(cases)}.values())[::-1]
    work = [(package, case[0], target) for case in cases for target in targets]
    if jobs == 1:
        return [_compile_named(*item) for item in work]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(_compile_named, *zip(*work, strict=True))) if work else []


@functools.cache
def _named(package: str) -> dict[str, tuple[str, Any, dict, dict, int]]:
    return {case[0]: case for case in discover(package)}


def _compile_named(package: str, name: str, target: str) -> Binary:
    # A kernel cannot be sent to another process; its name can.
    return compile_case(_named(package)[name], target)


def render(binaries: Sequence[Binary]) -> str:
    """The table of `python -m bench compile`."""
    width = max([len(b.name) for b in binaries] + [6])
    lines = [
        f"{'kernel':{width}} {'target':7} {'registers':>9} {'shared B':>9} {'spilled B':>9} "
        f"{'load bits':>9} {'tensor-core ops':>15}"
    ]
    for b in binaries:
        lines.append(
            f"{b.name:{width}} {b.target:7} "
            + (
                f"FAILED {b.error}"
                if b.error
                else f"{b.registers:9} {b.shared_bytes:9} {b.spill_bytes:9} {b.load_bits:9} "
                f"{b.tensor_core:15}" + _spills(b)
            )
        )
    lines.append(
        "registers: per thread. spilled: bytes of local memory per thread, "
        "a failure where not known. load bits: of the widest global load of a thread."
    )
    errors = sum(bool(b.error) for b in binaries)
    spills = [bool(b.known) for b in binaries if b.spill_bytes]
    lines.append(
        f"{len(binaries)} binaries: {errors} failed to compile, {spills.count(False)} spill "
        f"unexpectedly, {spills.count(True)} as known"
    )
    return "\n".join(lines)


def _spills(binary: Binary) -> str:
    if not binary.spill_bytes:
        return ""
    return f"   spills: {binary.known}" if binary.known else "   SPILLS"


def main(arguments: Sequence[str]) -> int:
    """`python -m bench compile`: 0 when all compiles for all targets, without a spill but known."""
    parser = argparse.ArgumentParser(prog="python -m bench compile", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="only cases whose name matches")
    parser.add_argument("--first", action="store_true", help="one case of each kernel")
    parser.add_argument("--targets", default=",".join(TARGETS), help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=files.output, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--package", default=PACKAGE, help="where to look for compile_cases()")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        # In the interpreter a kernel is no longer one: start afresh without it.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", __package__, "compile", *arguments]
        os.execve(sys.executable, command, environment)
    targets = [target for target in options.targets.split(",") if target]
    binaries = compile_all(
        options.package, options.pattern, targets, first=options.first, jobs=options.jobs
    )
    print(render(binaries))
    if options.json:
        files.write_json(options.json, [asdict(b) for b in binaries])
    if not binaries:
        print(f"no compile case of {options.package} matches {options.pattern!r}", file=sys.stderr)
        return 2
    return int(any(binary.failed for binary in binaries))
