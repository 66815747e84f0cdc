"""How an engine runs: one frozen, validated, printable object."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

from saguaro_kernels import Impl
from saguaro_kernels.errors import ConfigError
from saguaro_kernels.outcomes import Ranking

Method = Literal["ar", "sd", "ssd"]
Rule = Literal["token", "block", "hsd", "coupled"]
Allocation = Literal["uniform", "histogram", "best"]
Proposal = Literal["ngram", "replay", "none"]
PolicyName = Literal["adaptive", "auto", "batch_size", "fixed"]
LaneName = Literal["auto", "inline", "process", "stream"]
Attention = Literal["tree", "flash"]


class Fallback(str, enum.Enum):
    """What a row does when its outcome was not among the predicted ones."""

    IMMEDIATE_RETRY = "immediate_retry"
    """The missed rows get a short chain, a third of k; the others wait for it."""
    BATCHED_RETRY = "batched_retry"
    """The missed rows are redrafted together, k tokens each; the others wait for it."""
    PARTIAL_ACCEPT = "partial_accept"
    """The missed rows go on with what `proposal` finds, or with no draft; no row waits."""
    INDEPENDENT = "independent"
    """The missed rows sit a round out while they are redrafted; the others go on."""


_CHOICES: dict[str, tuple[str, ...]] = {
    "method": get_args(Method),
    "rule": get_args(Rule),
    "ranking": get_args(Ranking),
    "allocation": get_args(Allocation),
    "fallback": ("auto", *(choice.value for choice in Fallback)),
    "proposal": get_args(Proposal),
    "policy": get_args(PolicyName),
    "lane": get_args(LaneName),
    "impl": get_args(Impl),
    "attention": get_args(Attention),
}


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine; what belongs to one request is in SamplingParams.

    Args:
        method: "ar" plain decoding, "sd" draft then verify, "ssd" draft ahead while verifying.
        rule: verification rule; "hsd" is another name of "block".
        k: tokens drafted per round, 1..64.
        branches: outcomes prepared per request and round ("ssd"), 1..1024.
        ranking: how outcomes are ranked; "auto" goes by the request's temperature, and under
            `policy="auto"` by the measured hit rates.
        allocation: how branches are shared among accepted lengths: "uniform"; "histogram", by the
            lengths seen so far (Theorem 12 of the paper); or "best", the likeliest outcomes of all
            lengths by an estimate of the acceptance that learns as it goes.
        downweight: C <= 1, the factor of the largest probabilities the draft samples from ("ssd");
            their number is branches / (k + 1). 1 is off, and the better choice unless the ranking
            is "probability".
        fallback: what a missed row does, see Fallback; "auto" retries at batch 1 and goes on above.
        policy: who chooses where `fallback` is "auto": "batch_size", the batch alone (1; up to 32;
            more); "adaptive", the crossover of measured times and hit rates; "fixed", neither.
            "auto" also chooses k and branches, up to the values given here, and goes back to "sd"
            or "ar" where drafting is predicted to lose; see engine.stats()["policy"].
        proposal: what a missed row gets where it goes on at once: "ngram", what followed its last
            tokens earlier in the text; "replay", the chain of another outcome of the same length;
            or "none".
        reproducible: k is fixed and a missed row is redrafted with all of it, so a seed's text is
            the same alone and in a batch, on any lane, and under "sd" and "ssd".
        lane: where the draft runs; "inline": here, in turn with the target; "process": a second
            process (models on the CPU); "stream": a CUDA stream of its own beside the target's, on
            one GPU or on two. "auto" is "stream" for models on a GPU.
        device, draft_device: where models given by path go: "cpu", "cuda", "cuda:1", or "auto", a
            GPU for the target and another for the draft where there are two. None is the CPU, and
            for a draft the target's device, or "auto" if `device` is. Loaded models stay where
            they are.
        max_batch: most requests decoded at once.
        max_tokens: key-value slots of all requests together, prompts included.
        memory_limit: bytes for the logits of all branches, None for no limit. Where they do not
            fit, fewer branches are prepared, and engine.stats()["memory"] says how many.
        prefill_chunk: most prompt tokens prefilled between two rounds, so that a long prompt does
            not hold up the texts of others.
        threads, draft_threads: CPU threads of the target and of a draft process; None shares the
            cores.
        draft_timeout_s: how long a round waits for the draft before it goes on without it.
        draft_restarts: how often in a short time a draft process that failed is started again; one
            is forgotten for every 16 rounds that it answers.
        cuda_graphs: on a GPU, replay forwards of the usual shapes, captured when the engine is
            made; a model that cannot be captured is named in a warning and runs as it is.
        impl: implementation of the kernels, see saguaro_kernels.
        attention: of transformers models in prompts and verification; "tree" is our kernel,
            "flash" is flash-attn on GPUs (extra [flash]), for both models.

    Raises:
        ConfigError: a value is outside its range.
    """

    method: Method = "ssd"
    rule: Rule = "block"
    k: int = 4
    branches: int = 20
    ranking: Ranking = "auto"
    allocation: Allocation = "best"
    downweight: float = 1.0
    fallback: str = "auto"
    proposal: Proposal = "ngram"
    policy: PolicyName = "adaptive"
    memory_limit: int | None = None
    reproducible: bool = False
    lane: LaneName = "auto"
    device: str | None = None
    draft_device: str | None = None
    max_batch: int = 8
    max_tokens: int = 16384
    prefill_chunk: int = 512
    threads: int | None = None
    draft_threads: int = 1
    draft_timeout_s: float = 30.0
    draft_restarts: int = 5
    cuda_graphs: bool = True
    impl: Impl = "auto"
    attention: Attention = "tree"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: got {getattr(self, name)!r}, want one of {choices}")
        for name, low, high in (
            ("k", 1, 64),
            ("branches", 1, 1024),
            ("max_batch", 1, 1 << 16),
            ("max_tokens", 1, 1 << 40),
            ("prefill_chunk", 1, 1 << 30),
            ("threads", 1, 1024),
            ("draft_threads", 1, 1024),
            ("draft_restarts", 0, 1 << 30),
            ("memory_limit", 1, 1 << 60),
        ):
            value = getattr(self, name)
            if not (value is None and name in ("threads", "memory_limit")):
                check_number(name, value, low, high, whole=True)
        check_number("downweight", self.downweight, 0, 1, above=True)
        check_number("draft_timeout_s", self.draft_timeout_s, 0, 1e6, above=True)
        if self.downweight < 1 and self.rule == "coupled":
            raise ConfigError(f"downweight: got {self.downweight}, want 1 with rule='coupled'")
        for name in ("reproducible", "cuda_graphs"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}: got {value!r}, want True or False")
        for name in ("device", "draft_device"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ConfigError(f"{name}: got {value!r}, want a name such as 'cuda:0', or None")

    @property
    def draft_len(self) -> int:
        """Tokens a chain may have: k, or 0 where nothing is drafted."""
        return 0 if self.method == "ar" else self.k

    @property
    def fan_out(self) -> int:
        """Branches per request and round: SD is SSD that prepares none."""
        return self.branches if self.method == "ssd" else 0


def check_number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    whole: bool = False,
    above: bool = False,
) -> None:
    """Raise ConfigError unless `value` is a number in [low, high]; above: in (low, high]; whole: an
    integer."""
    kind = not isinstance(value, bool) and isinstance(value, int if whole else Real)
    if not (kind and low <= value <= high and not (above and value == low)):
        wanted = f"an integer in {low}..{high}" if whole else f"in {'[('[above]}{low:g}, {high:g}]"
        raise ConfigError(f"{name}: got {value!r}, want {wanted}")
