"""The engine's part of `python -m bench gpu`: lanes against each other, overlap, a graph.

The models are random, of this size and that, so their text means nothing; the draft is the target's
first layers, so that a part of its drafts is accepted. One stream, in turn, is the reference order:
two streams, and two devices, must give its text.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

PROMPTS, NEW_TOKENS, K, BRANCHES = 4, 96, 4, 16
WARM_UP_TOKENS = 12
CHUNK = 512
"""Tokens of a prompt that are taken in at once."""


def pair(dtype: torch.dtype, devices: tuple[str, str], *, hidden: int, layers: int) -> Any:
    """A random target and a draft of its first layers, an eighth of them."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), max_position_embeddings=4096,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.device(devices[0]):
        target: Any = transformers.LlamaForCausalLM(config)
        target = target.to(dtype).eval()
    target.lm_head.weight.data.mul_(8.0)
    target.generation_config.eos_token_id = None
    keep = max(1, layers // 8)
    for layer in target.model.layers[keep:]:  # what the draft lacks changes little
        layer.self_attn.o_proj.weight.data.mul_(0.1)
        layer.mlp.down_proj.weight.data.mul_(0.1)
    draft = copy.deepcopy(target)
    draft.model.layers = draft.model.layers[:keep]
    draft.config.num_hidden_layers = keep
    return target, draft.to(devices[1])


def run(target: Any, draft: Any, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Texts of a few requests, greedy and sampled, and the engine's numbers without a warm-up."""
    from saguaro_runtime import Engine, EngineConfig, SamplingParams

    settings = {"k": K, "branches": BRANCHES, "max_batch": PROMPTS, "max_tokens": 4096}
    prompts = [[7 + 3 * row + i for i in range(20 + 9 * row)] for row in range(PROMPTS)]
    params = [
        SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.7 * (row % 2), seed=row)
        for row in range(PROMPTS)
    ]
    with Engine(target, draft, EngineConfig(**(settings | options))) as engine:
        engine.generate(prompts, SamplingParams(max_new_tokens=WARM_UP_TOKENS))
        engine.reset_stats()
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
        rounds = sum(span.name == "verify" for span in engine.spans)
    return [output.token_ids for output in outputs], stats | {
        "round_ms": 1e3 * stats["seconds"] / rounds
    }


def lanes_agree(devices: tuple[str, str]) -> tuple[str, bool]:
    """float32: the text of two streams is that of one; on two devices that of one device."""
    target, draft = pair(torch.float32, (devices[0], devices[0]), hidden=512, layers=8)
    options = {"reproducible": True, "policy": "fixed", "cuda_graphs": False}
    expected, before = run(target, draft, lane="inline", **options)
    found, stats = run(target, draft.to(devices[1]), lane="stream", **options)
    if stats["speculation"] != "on" or before["speculation"] != "on":
        return f"the draft failed: {stats['draft_faults'] or before['draft_faults']}", True
    hits = f"{stats['hits']} hits, {stats['misses']} misses"
    # Forwards are of equal widths on both lanes, so not even near ties should differ.
    differ = sum(a != b for a, b in zip(expected, found, strict=True))
    if differ:
        return f"{differ} of {len(found)} texts differ; {hits}", True
    return f"ok, {hits}", False


def graphs_agree(devices: tuple[str, str]) -> tuple[str, bool]:
    """float32: the text with CUDA graphs is that without, and what a round takes with both."""
    target, draft = pair(torch.float32, devices, hidden=512, layers=8)
    found = {
        on: run(target, draft, lane="stream", cuda_graphs=on, reproducible=True, policy="fixed")
        for on in (False, True)
    }
    for name, its in found[True][1]["cuda_graphs"].items():
        if not its["captured"] or its["eager"]:
            return f"{name}: {its['eager']} forwards were not replayed: {its['why']}", True
    differ = sum(a != b for a, b in zip(found[False][0], found[True][0], strict=True))
    off, on = found[False][1]["round_ms"], found[True][1]["round_ms"]
    words = f"{differ} of {len(found[True][0])} texts differ" if differ else "ok"
    return f"{words}, a round {off:.2f} ms without, {on:.2f} ms with graphs", differ > 0


def speed(devices: tuple[str, str]) -> tuple[str, bool]:
    """bfloat16: tokens a second of plain decoding, SD and SSD, and how much of the draft's work
    lay beside the target's. Not a check: random models say nothing of real acceptance."""
    target, draft = pair(torch.bfloat16, devices, hidden=2048, layers=24)
    words = []
    for method, lane in (("ar", "auto"), ("sd", "stream"), ("ssd", "stream")):
        _, stats = run(target, None if method == "ar" else draft, method=method, lane=lane)
        words.append(f"{method} {stats['tokens_per_s']:.0f} tok/s")
    _, plain = run(target, draft, lane="stream", cuda_graphs=False)
    rounds = f"{plain['round_ms']:.2f} ms without graphs, {stats['round_ms']:.2f} ms with"
    words.append(f"a round {rounds}")
    words.append(f"overlap {stats['overlap']:.0%}, verify {stats['t_verify_ms']:.2f} ms")
    words.append(f"ahead {stats['t_look_ahead_ms']:.2f} ms")
    return ", ".join(words), stats["speculation"] != "on"


def round_as_graph(device: str) -> tuple[str, bool]:
    """A verification, forward and verdict, captured once and replayed on other tokens."""
    from saguaro_kernels import Draft, Keys, Sampling, verify
    from saguaro_runtime.models import as_model

    target, _ = pair(torch.bfloat16, (device, device), hidden=1024, layers=8)
    with torch.no_grad():
        model = as_model(target, rows=PROMPTS, tokens=4096, impl="auto")
        rows = torch.arange(PROMPTS, device=device)
        tokens = torch.randint(0, 32000, (PROMPTS, K + 1), device=device)
        trunk = torch.full((PROMPTS,), 64, dtype=torch.int32, device=device)
        for row in range(PROMPTS):
            model.allocate(row, 256)
            model.prefill(row, torch.randint(0, 32000, (64,), device=device))
        sampling = Sampling(torch.zeros(PROMPTS, device=device))
        keys = Keys(torch.arange(PROMPTS, device=device), trunk.long() + 1)
        count = torch.full((PROMPTS,), K, dtype=torch.int32, device=device)

        def one_round() -> tuple[torch.Tensor, ...]:
            logits = model.extend(rows, tokens, trunk)
            verdict = verify(logits, Draft(tokens[:, 1:], count), sampling, keys, rule="token")
            return verdict.num_accepted, verdict.tokens, verdict.status

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):
                one_round()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = one_round()
        # The greedy continuation as drafts: some rows are accepted, and the graph must see it.
        tokens[:, 1:] = model.extend(rows, tokens, trunk).argmax(-1)[:, :-1]
        expected = [its.clone() for its in one_round()]
        graph.replay()
        torch.cuda.synchronize()
        same = all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
        eager, replayed = _time_us(one_round), _time_us(graph.replay)
    words = "equal" if same else "DIFFERS"
    return f"{words}, eager {eager:.0f} us, replayed {replayed:.0f} us", not same


def flash_agrees(device: str) -> tuple[str, bool]:
    """bfloat16 chains of rows of several lengths by both attentions, and what each takes."""
    from saguaro_kernels.tree_attention import tree_attention
    from saguaro_runtime.models import flash

    try:
        import flash_attn
    except ImportError as missing:
        return f"not compared, flash-attn cannot be imported: {missing}", False
    torch.manual_seed(0)
    draw = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    table = torch.arange(5 * PROMPTS, dtype=torch.int32, device=device).flip(0).view(PROMPTS, 5)
    keys, values = draw(2, table.numel(), flash.page_size("flash"), 4, 128)
    trunk = torch.arange(PROMPTS, dtype=torch.int32, device=device) * 97 + 300
    ours: Any = tree_attention
    words, worst = [f"flash-attn {flash_attn.__version__}"], 0.0
    for name, width in (("verification", K + 1), ("prompt", CHUNK)):
        query = draw(PROMPTS, width, 16, 128)
        depth = torch.arange(width, dtype=torch.int32, device=device).repeat(PROMPTS, 1)
        lengths: Any = {"trunk_len": trunk, "depth": depth, "draft_len": 0, "step": -1}
        capped: dict[str, Any] = {"window": 100, "softcap": 3.0}
        for options in (capped, {}):
            pages = (query, keys, values, table)
            tree = functools.partial(ours, *pages, **lengths, **options)
            theirs = functools.partial(flash.attend, *pages, trunk + width, **options)
            expected, found = tree().float(), theirs().float()
            error = float((found - expected).square().mean().sqrt() / expected.std())
            worst = max(worst, error)
        words.append(f"{name} {_time_us(theirs):.0f} us, ours {_time_us(tree):.0f} us")
    words.append(f"RMS error {worst:.2%} of the deviation")
    return ", ".join(words), not worst < 0.02


def _time_us(work: Callable[[], Any], repeats: int = 20) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


def parts(two_devices: bool) -> list[tuple[str, str, Callable[[], tuple[str, bool]]]]:
    """(name, shape, check) of each; a check says what it found and whether that is a failure."""
    one = ("cuda:0", "cuda:0")
    found = [
        ("engine: streams = inline", f"B{PROMPTS}-K{K}-M{BRANCHES}", lambda: lanes_agree(one)),
        ("engine: graphs = no graphs", f"B{PROMPTS}-K{K}-M{BRANCHES}", lambda: graphs_agree(one)),
        ("engine: a round as a graph", f"B{PROMPTS}-K{K}", lambda: round_as_graph("cuda:0")),
        ("engine: flash = tree attention", f"B{PROMPTS}-K{K}", lambda: flash_agrees("cuda:0")),
        ("engine: speed, 1 device", f"B{PROMPTS}-K{K}-M{BRANCHES}", lambda: speed(one)),
    ]
    if two_devices:
        two = ("cuda:0", "cuda:1")
        found += [
            ("engine: 2 devices = inline", f"B{PROMPTS}-K{K}", lambda: lanes_agree(two)),
            ("engine: graphs, 2 devices", f"B{PROMPTS}-K{K}", lambda: graphs_agree(two)),
            ("engine: speed, 2 devices", f"B{PROMPTS}-K{K}", lambda: speed(two)),
        ]
    return found
