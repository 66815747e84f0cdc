"""What the demo measures, and its numbers as one JSON object and as a table."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cli import engine_config, version
from ..config import EngineConfig
from ..params import SamplingParams
from ..planner import measured
from ..policy import retry_length

KEYS = (
    "tokens_per_s",
    "tokens_per_round",
    "accepted_per_round",
    "hit_rate",
    "overlap",
    "t_verify_ms",
    "t_draft_step_ms",
    "t_sample_ms",
)
SPEEDS = (
    ("sd", "ar"),
    ("ssd", "ar"),
    ("ssd", "sd"),
    ("ssd", "ar_2_threads"),
    ("ssd", "sd_2_threads"),
    ("ssd", "assisted"),
)


LABELS = {
    "ar": "AR",
    "ar_2_threads": "AR, 2 threads",
    "sd": "SD",
    "sd_2_threads": "SD, 2 threads",
    "assisted": "transformers' assisted",
    "ssd": "SSD",
}


@dataclass(frozen=True)
class Variant:
    """One line of the table: a method, and the cores it may use."""

    name: str
    config: EngineConfig


def plan(args: argparse.Namespace, cores: int) -> list[Variant]:
    """What is measured. The methods proper give the target one core and the draft another.

    Plain decoding, SD and transformers' own assisted generation also run with both cores for
    whichever model is at work: that is what two cores can do without SSD.
    """
    # policy: nothing changes amid the measurement
    config = engine_config(args, method="ar", threads=1, policy="batch_size")
    variants = [Variant("ar", config), Variant("sd", replace(config, method="sd"))]
    if cores > 1:
        both = replace(config, threads=2, lane="inline")
        variants.insert(1, Variant("ar_2_threads", both))
        taking_turns = replace(both, method="sd")
        variants.append(Variant("sd_2_threads", taking_turns))
        variants.append(Variant("assisted", taking_turns))
    variants.append(Variant("ssd", replace(config, method="ssd")))
    wanted = ("ar", "sd", "ssd") if args.method == "all" else (args.method,)
    return [variant for variant in variants if variant.config.method in wanted]


def summarize(
    rows: Mapping[str, Mapping[str, Any]],
    check: tuple[str, float | None] | None,
    variants: Sequence[Variant],
    params: SamplingParams,
    dtype: str,
    prompts: int,
) -> dict[str, Any]:
    """What `--json` prints. Rates of nothing are 0; what was not run is null or absent."""
    config = variants[-1].config
    equal, gap = check or (None, None)
    return {
        "methods": {name: {key: row[key] for key in KEYS} for name, row in rows.items()},
        "speed": {
            f"{fast}_vs_{slow}": rows[fast]["tokens_per_s"] / rows[slow]["tokens_per_s"]
            for fast, slow in SPEEDS
            if fast in rows and slow in rows
        },
        "texts_equal": equal,
        "texts_gap": gap,
        "predicted_ssd_vs_sd": predict(rows["sd"], rows["ssd"], config)
        if "sd" in rows and "ssd" in rows
        else None,
        "predicted_in_full": predict(rows["sd"], rows["ssd"], config, form=measured.in_full)
        if "sd" in rows and "ssd" in rows
        else None,
        "settings": {
            "dtype": dtype,
            "prompts": prompts,
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "rule": config.rule,
            "ranking": config.ranking,
            "k": config.k,
            "branches": config.branches,
        },
        "machine": machine(),
        "versions": versions(),
    }


def predict(
    sd: Mapping[str, Any],
    ssd: Mapping[str, Any],
    config: EngineConfig,
    batch: int = 1,
    retry: int | None = None,
    form: Callable[..., float] = measured.raw,
) -> float:
    """SSD against SD by Theorem 7, from the times, tokens and hit rate measured in these runs.

    `config` is that of SSD; `retry` is what a missed row redrafts, if not what it says; `form`: as
    published, or with all that a round pays.
    """
    retry = retry_length(config, batch) if retry is None else retry
    return form(sd, ssd, k=config.k, batch=batch, retry=retry)


def machine() -> dict[str, Any]:
    """What was measured on, and when."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    date = datetime.date.today().isoformat()
    return {"date": date, "processor": processor, "cores": os.cpu_count()}


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on; "missing" where a package is not installed."""
    found = {"saguaro": version(), "python": platform.python_version()}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def render(report: Mapping[str, Any]) -> str:
    """The table and the sentences under it."""
    methods = report["methods"]
    head = (
        "",
        "tokens/s",
        "vs AR",
        "vs SD",
        "tokens/round",
        "accepted/round",
        "hit rate",
        "overlap",
    )
    lines = [head]
    for name, row in methods.items():
        lines.append(
            (
                LABELS[name],
                f"{row['tokens_per_s']:.1f}",
                _ratio(methods, name, "ar"),
                _ratio(methods, name, "sd"),
                f"{row['tokens_per_round']:.2f}" if row["tokens_per_round"] else "-",
                f"{row['accepted_per_round']:.2f}"
                if row["accepted_per_round"] and not name.startswith("ar")
                else "-",
                f"{row['hit_rate']:.2f}" if name == "ssd" else "-",
                f"{row['overlap']:.2f}" if name == "ssd" else "-",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    table = [
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*table, "", *_sentences(report)])


def _ratio(methods: Mapping[str, Any], name: str, base: str) -> str:
    if base not in methods:
        return "-"
    return f"{methods[name]['tokens_per_s'] / methods[base]['tokens_per_s']:.2f}"


def _sentences(report: Mapping[str, Any]) -> list[str]:
    settings = report["settings"]
    lines = [
        f"{settings['prompts']} prompts, up to {settings['max_new_tokens']} tokens each, "
        f"{settings['dtype']}, temperature {settings['temperature']:g}, rule {settings['rule']}, "
        f"k {settings['k']}, {settings['branches']} branches"
    ]
    if ssd := report["methods"].get("ssd"):
        step = ssd["t_draft_step_ms"]
        share = ssd["t_sample_ms"] / step if step else 0.0
        lines.append(
            f"SSD: verification {ssd['t_verify_ms']:.1f} ms, a draft step over all branches "
            f"{step:.1f} ms, sampling {ssd['t_sample_ms']:.1f} ms ({share:.0%} of it)"
        )
    full = report.get("predicted_in_full")
    if report["predicted_ssd_vs_sd"] is not None:
        lines.append(
            f"SSD against SD: {report['speed']['ssd_vs_sd']:.2f} measured, "
            f"{report['predicted_ssd_vs_sd']:.2f} predicted from these times by Theorem 7"
            + (f", {full:.2f} with all that a round pays" if full is not None else "")
        )
    if report["texts_equal"] is not None:
        gap = report["texts_gap"]
        lines.append(
            f"texts of the methods (float32): {report['texts_equal'].replace('_', ' ')}"
            + (f", gap {gap:.1e}" if gap is not None else "")
        )
    return lines
