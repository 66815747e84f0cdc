"""How often is the outcome among the predicted ones? On a real pair, by ranking and allocation.

Which branches are prepared changes no token where the text is reproducible, so one decoding per
temperature serves all predictors: each sees the same chains, predicts, and learns what came. Then
the time of a tree step against a single-token step of the same draft.

    weak     the demo's pair
    strong   the same target, drafted for by itself without layers 3, 5 and 12: better, and slow

Every cell is written when it is done; a second run computes what is missing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from saguaro_kernels import Impl
from saguaro_runtime import Engine, EngineConfig, SamplingParams
from saguaro_runtime.expectations import Predictor
from saguaro_runtime.round import Reply, Turn
from saguaro_runtime.speculator import Speculator

from . import files, report

RESULTS = Path(__file__).with_name("results") / "hit_rates.json"
RANKINGS = ("probability", "noise")
ALLOCATIONS = ("uniform", "histogram", "best")
TEMPERATURES = (0.0, 0.6, 1.0)
DROPPED_LAYERS = (3, 5, 12)
TREE_SIZES = (4, 8, 12, 16, 20, 24, 32)


class Watch(Speculator):
    """A drafter of standard SD whose outcomes several predictors guess beside each other."""

    predictors: dict[tuple[str, str], Predictor]
    branches_asked: int
    asked: Counter[tuple[str, str]]
    hits: Counter[tuple[str, str]]

    def watch(self, rows: int, branches: int) -> None:
        """Start guessing with `branches` branches per request."""
        self.predictors = {
            (ranking, allocation): Predictor(rows, self.drafter.draft_len, branches, allocation)
            for ranking in RANKINGS
            for allocation in ALLOCATIONS
        }
        self.branches_asked = branches
        self.asked, self.hits = Counter(), Counter()
        self._guesses: dict[tuple[str, str], tuple[Turn, torch.Tensor, torch.Tensor]] = {}

    def next_chain(self, turn: Turn) -> Reply:
        for name, (before, depth, extra) in self._guesses.items():
            branch = torch.full_like(turn.accepted, -1)
            for index, uid in enumerate(turn.uid.tolist()):
                where = (before.uid == uid).nonzero()[:, 0]
                if len(where) and int(turn.accepted[index]) >= 0:
                    right = (depth[where[0]] == turn.accepted[index]) & (
                        extra[where[0]] == turn.last[index]
                    )
                    self.asked[name] += 1
                    self.hits[name] += int(right.any())
                    branch[index] = int(right.int().argmax()) if bool(right.any()) else -1
            self.predictors[name].learn(turn, self.chain, branch)
        return super().next_chain(turn)

    def look_ahead(self, *, late: bool = False) -> None:
        turn = self._awake
        super().look_ahead(late=late)
        if turn is None:
            return
        for name, predictor in self.predictors.items():
            decision = turn.decision._replace(branches=self.branches_asked, ranking=name[0])
            asked = Turn(turn.number, decision, *turn.tensors())
            self._guesses[name] = (turn, *predictor.predict(asked, self.drafter))


def measure_rates(
    target: Any,
    draft: Any,
    prompts: Sequence[list[int]],
    *,
    temperature: float,
    tokens: int,
    k: int,
    branches: int,
    batch: int,
    min_rounds: int,
    impl: Impl = "reference",
) -> list[dict[str, Any]]:
    """One cell per ranking and allocation: rounds that could hit, and those that did.

    At temperatures above 0 the prompts are decoded with new seeds until `min_rounds` were seen.
    """
    config = EngineConfig(
        method="sd", k=k, branches=branches, reproducible=True, lane="inline", max_batch=batch,
        impl=impl,
    )  # fmt: skip
    with Engine(target, draft, config) as engine:
        speculator = engine.lane.speculator  # type: ignore[union-attr]
        speculator.__class__ = Watch
        speculator.watch(batch, branches)
        start, first, rounds = time.monotonic(), 0, 0
        while not first or (temperature > 0 and rounds < min_rounds):
            params = [
                SamplingParams(tokens, temperature, seed=first + index)
                for index in range(len(prompts))
            ]
            engine.generate(prompts, params)
            first += len(prompts)
            rounds = next(iter(speculator.asked.values()))
        stats = engine.stats()
    return [
        {
            "ranking": ranking,
            "allocation": allocation,
            "rounds": speculator.asked[ranking, allocation],
            "hits": speculator.hits[ranking, allocation],
            "hit_rate": round(speculator.hits[ranking, allocation] / max(rounds, 1), 4),
            "tokens_per_round": round(stats["tokens_per_round"], 3),
            "seconds": round(time.monotonic() - start, 1),
        }
        for ranking, allocation in speculator.predictors
    ]


def measure_tree_steps(
    model: Any, sizes: Sequence[int], *, trunk: int, repeats: int, draft_len: int
) -> list[dict[str, Any]]:
    """The time of a tree step of M branches, and of one token; medians, the sizes taking turns."""
    from saguaro_runtime.models import as_model

    most = max(sizes)
    ours = as_model(model, rows=1, tokens=trunk + (draft_len + 1) * (most + 1) + 64,
                    impl="reference")  # fmt: skip
    ours.allocate(0, trunk + (draft_len + 1) * (most + 1))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(ours.vocab_size, (trunk,), generator=generator)
    ours.prefill(0, text)
    rows, trunk_len = torch.tensor([0]), torch.tensor([trunk], dtype=torch.int32)
    seconds: dict[int, list[float]] = {0: [], **{size: [] for size in sizes}}
    with torch.no_grad():
        for turn in range(repeats + 1):
            for size, its in seconds.items():
                tokens = torch.randint(ours.vocab_size, (1, max(size, 1)), generator=generator)
                start = time.perf_counter()
                if size:
                    depth = torch.arange(size, dtype=torch.int32)[None] % (draft_len + 1)
                    ours.decode_tree(rows, tokens, trunk_len, depth, draft_len, 0)
                else:
                    ours.extend(rows, tokens, trunk_len)
                if turn:  # the first is a warm-up
                    its.append(time.perf_counter() - start)
    single = statistics.median(seconds.pop(0))
    return [
        {
            "branches": size,
            "ms": round(1e3 * statistics.median(its), 3),
            "single_token_ms": round(1e3 * single, 3),
            "ratio": round(statistics.median(its) / single, 3),
        }
        for size, its in seconds.items()
    ]


def without_layers(model: Any, dropped: Sequence[int]) -> Any:
    """A copy of a transformers model that lacks some layers; what is left is numbered anew."""
    config = copy.deepcopy(model.config)
    kept = [index for index in range(config.num_hidden_layers) if index not in dropped]
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    smaller = type(model)(config).to(model.dtype)
    own = model.state_dict()
    weights = {}
    for name in smaller.state_dict():
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(kept[int(parts[at])])
        weights[name] = own[".".join(parts)]
    smaller.load_state_dict(weights)
    return smaller.eval()


class Results:
    """The cells so far, in a file that is written after each."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.data: dict[str, Any] = {"settings": settings, "rates": [], "tree_steps": []}
        if path.exists():
            found = json.loads(path.read_text())
            if found.get("settings") == settings:
                self.data = found

    def has(self, pair: str, temperature: float | None) -> bool:
        """Whether a pair's rates at a temperature, or its tree steps (None), are there."""
        if temperature is None:
            return any(cell["pair"] == pair for cell in self.data["tree_steps"])
        return any(
            (cell["pair"], cell["temperature"]) == (pair, temperature)
            for cell in self.data["rates"]
        )

    def add(self, kind: str, cells: Sequence[dict[str, Any]]) -> None:
        """Keep cells of "rates" or "tree_steps"."""
        self.data[kind] += cells
        self.data["machine"] = report.machine() | {"threads": torch.get_num_threads()}
        files.write_json(self.path, self.data)


def render(data: dict[str, Any]) -> str:
    """Two tables: hit rates by pair and temperature, tree steps by number of branches."""
    rows = [
        (
            cell["pair"], cell["temperature"], cell["ranking"], cell["allocation"],
            cell["rounds"], f"{cell['hit_rate']:.3f}", cell["tokens_per_round"],
        )
        for cell in data["rates"]
    ]  # fmt: skip
    headers = ("pair", "T", "ranking", "allocation", "rounds", "hit rate", "tokens/round")
    steps = [
        (cell["pair"], cell["branches"], cell["ms"], cell["single_token_ms"], cell["ratio"])
        for cell in data["tree_steps"]
    ]
    names = ("pair", "branches", "tree step ms", "one token ms", "ratio")
    return report.table(headers, rows) + "\n\n" + report.table(names, steps)


def summary(data: dict[str, Any]) -> str:
    """One line per pair and temperature, one column per allocation and ranking; then the steps."""
    rates = {
        (cell["pair"], cell["temperature"], cell["ranking"], cell["allocation"]): cell
        for cell in data["rates"]
    }
    kinds = [(allocation, ranking) for allocation in ALLOCATIONS for ranking in RANKINGS]
    rows = []
    for pair, temperature in dict.fromkeys(rate[:2] for rate in rates):
        found = [rates[pair, temperature, ranking, allocation] for allocation, ranking in kinds]
        values = [f"{cell['hit_rate']:.3f}" for cell in found]
        rows.append((pair, temperature, found[0]["rounds"], *values))
    headers = ("pair", "T", "rounds", *(f"{a}, {r}" for a, r in kinds))
    steps: dict[str, list[dict[str, Any]]] = {}
    for cell in data["tree_steps"]:
        steps.setdefault(cell["pair"], []).append(cell)
    lines = [
        f"tree step against one token, {pair}: "
        + ", ".join(f"{its['branches']}: {its['ratio']:.2f}" for its in found)
        for pair, found in steps.items()
    ]
    return "\n".join([report.table(headers, rows), "", *lines])


def cells(
    results: Results, pairs: Iterator[tuple[str, Any, Any]], prompts: Sequence[list[int]]
) -> None:
    """Compute what `results` lacks."""
    settings = results.settings
    for pair, target, draft in pairs:
        for temperature in settings["temperatures"]:
            if not results.has(pair, temperature):
                rates = measure_rates(
                    target, draft, prompts, temperature=temperature,
                    **{name: settings[name] for name in _RATE_SETTINGS},
                )  # fmt: skip
                named = {"pair": pair, "temperature": temperature}
                results.add("rates", [named | cell for cell in rates])
                print(f"{pair}, T = {temperature}: {rates[0]['rounds']} rounds", flush=True)
        if not results.has(pair, None):
            steps = measure_tree_steps(
                draft, settings["tree_sizes"], trunk=settings["trunk"],
                repeats=settings["repeats"], draft_len=settings["k"],
            )  # fmt: skip
            results.add("tree_steps", [{"pair": pair} | cell for cell in steps])


_RATE_SETTINGS = ("tokens", "k", "branches", "batch", "min_rounds")


def main(arguments: Sequence[str]) -> int:
    """`python -m bench hit_rates`: 0 when every cell is there."""
    parser = argparse.ArgumentParser(
        prog="python -m bench hit_rates", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, default=20, help="half chat, half code (20)")
    parser.add_argument("--tokens", type=int, default=64, help="per prompt (64)")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--branches", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="prompts decoded at once (4)")
    parser.add_argument("--min-rounds", type=int, default=500, help="at least, where T > 0 (500)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--json", type=files.output, metavar="FILE", default=str(RESULTS))
    options = parser.parse_args(arguments)
    settings = {
        "prompts": options.prompts,
        **{name: getattr(options, name) for name in _RATE_SETTINGS},
        "dtype": options.dtype,
        "temperatures": list(TEMPERATURES),
        "dropped_layers": list(DROPPED_LAYERS),
        "tree_sizes": list(TREE_SIZES),
        "trunk": 256,
        "repeats": 21,
    }
    torch.set_num_threads(options.threads)
    results = Results(options.json, settings)
    pairs, prompts = _real_pairs(options)
    cells(results, pairs, prompts)
    print(render(results.data))
    return 0


def _real_pairs(
    options: argparse.Namespace,
) -> tuple[Iterator[tuple[str, Any, Any]], list[list[int]]]:
    import transformers

    from saguaro_runtime.demo.model import load_pair
    from saguaro_runtime.models.loading import load_draft, load_model

    from .equality import chat_prompts, code_prompts

    transformers.utils.logging.disable_progress_bar()
    paths = load_pair()
    tokenizer = transformers.AutoTokenizer.from_pretrained(paths[0])
    dtype = getattr(torch, options.dtype)
    target = load_model(paths[0], dtype)
    half = options.prompts // 2
    prompts = chat_prompts(tokenizer, options.prompts - half) + code_prompts(tokenizer, half)

    def pairs() -> Iterator[tuple[str, Any, Any]]:
        yield "weak", target, load_draft(paths[1], target, dtype)
        yield "strong", target, without_layers(target, DROPPED_LAYERS)

    return pairs(), prompts
