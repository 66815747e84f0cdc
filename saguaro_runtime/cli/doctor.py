"""`saguaro doctor`: what this machine has, what would be used, and why."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from typing import Any

import torch

from saguaro_kernels.errors import ConfigError, SaguaroError

from ..build import choose_lane, lane_on
from ..config import EngineConfig
from ..demo.model import find_pair
from ..demo.report import versions
from ..devices import places
from . import add_device_options

_DEFAULT = EngineConfig()

EXAMPLES = """\
  saguaro doctor
  saguaro doctor --json
  saguaro doctor --target ./llama-8b --draft ./llama-1b      loads both and tries them together
  saguaro doctor --target ./llama-8b --draft ./llama-1b --device auto      on GPUs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="PATH", help="folder or hub name of a model to try")
    parser.add_argument("--draft", metavar="PATH", help="the draft to go with it")
    add_device_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if (args.target is None) != (args.draft is None):
        raise ConfigError("--target and --draft: got one of the two, want both or neither")
    report = examine()
    if args.target:
        config = EngineConfig(device=args.device, draft_device=args.draft_device)
        report["speculation"] = try_pair(args.target, args.draft, config)
    print(json.dumps(report, indent=2) if args.json else render(report))
    return 0 if report["speculation"]["active"] else 1


def examine() -> dict[str, Any]:
    """What is here and what an engine with default options would choose; loads no model."""
    cores = os.cpu_count() or 1
    lane = choose_lane(EngineConfig())
    gpus = range(torch.cuda.device_count())
    return {
        "versions": versions(),
        "flash_attn": importlib.util.find_spec("flash_attn") is not None,
        "cpu": {
            "cores": cores,
            "threads": torch.get_num_threads(),
            "faster_dtype": faster_dtype(),
        },
        "gpus": [_gpu(index) for index in gpus],
        "peer_access": [
            [a == b or torch.cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus
        ],
        "implementation": {kind: implementation(kind) for kind in ("cpu", *["cuda"][: len(gpus)])},
        "lane": lane,
        "on_gpus": _on_gpus() if gpus else None,
        "speculation": _speculation(lane),
        "demo_models": list(find_pair() or ()),
    }


def implementation(kind: str) -> str:
    """Which of the two implementations the ops take for tensors on this kind of device."""
    from saguaro_kernels._launch import INTERPRETED, resolve_impl

    name = resolve_impl("auto", torch.device(kind))
    return f"{name}, interpreted (TRITON_INTERPRET=1)" if INTERPRETED else name


def faster_dtype(rows: int = 5, repeats: int = 15) -> str:
    """The dtype in which this processor multiplies a few rows sooner: "bfloat16" or "float32".

    Measured (30 ms) on a matrix larger than the second-level cache, as a model's weights are, and
    on one thread, so that other work on the machine does not decide it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = {}
    for name in ("bfloat16", "float32"):
        dtype = getattr(torch, name)
        x, weight = torch.ones(rows, 1024, dtype=dtype), torch.ones(4096, 1024, dtype=dtype)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            times.append(time.perf_counter() - start)
        best[name] = min(times)
    torch.set_num_threads(threads)
    return min(best, key=lambda name: best[name])


def try_pair(target: str, draft: str, config: EngineConfig = _DEFAULT) -> dict[str, Any]:
    """Load the pair, decode a few tokens with it, and say whether it speculated."""
    from .. import Engine, SamplingParams

    try:
        with Engine(target, draft, config) as engine:
            engine.generate([[0]], SamplingParams(max_new_tokens=8, ignore_eos=True))
            state = engine.stats()["speculation"]
    except SaguaroError as error:
        return {"active": False, "why": str(error)}
    if state != "on":
        return {"active": False, "why": state}
    return {"active": True, "why": "the pair was loaded and decoded 8 tokens with it"}


def render(report: dict[str, Any]) -> str:
    """The report as lines: a name and what was found."""
    cpu, speculation = report["cpu"], report["speculation"]
    lines = [(name, text) for name, text in report["versions"].items()]
    lines.append(("flash-attn", "installed" if report["flash_attn"] else "not installed"))
    lines.append(
        ("cpu", f"{cpu['cores']} cores, {cpu['threads']} threads, faster in {cpu['faster_dtype']}")
    )
    for index, gpu in enumerate(report["gpus"]):
        peers = [
            str(peer)
            for peer, can in enumerate(report["peer_access"][index])
            if can and peer != index
        ]
        lines.append(
            (
                f"gpu {index}",
                f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB, sm_{gpu['capability']}, "
                f"peer access: {', '.join(peers) or 'none'}",
            )
        )
    if not report["gpus"]:
        lines.append(("gpu", "none that torch can use"))
    for kind, name in report["implementation"].items():
        lines.append((f"kernels on {kind}", name))
    lines.append(("lane", report["lane"]))
    if found := report["on_gpus"]:
        where = f"with --device auto; target on {found['target']}, draft on {found['draft']}"
        lines.append(("lane on gpus", f"{found['lane']}, {where}"))
    lines.append(
        ("speculation", f"{'on' if speculation['active'] else 'off'}: {speculation['why']}")
    )
    lines.append(
        ("demo models", " ".join(report["demo_models"]) or "not fetched yet (saguaro demo)")
    )
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in lines)


def _speculation(lane: str) -> dict[str, Any]:
    if lane == "inline":
        why = (
            "but with one core the draft and the target take turns, so ssd cannot be faster than sd"
        )
    else:
        why = "a second process drafts while the target verifies"
    return {"active": True, "why": why}


def _on_gpus() -> dict[str, str]:
    """The lane and the devices of `--device auto`."""
    config = EngineConfig(device="auto")
    target, draft = places(config)
    return {"lane": lane_on(target, config), "target": str(target), "draft": str(draft)}


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}{properties.minor}",
        "memory_gib": properties.total_memory / 2**30,
    }
