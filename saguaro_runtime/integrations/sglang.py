"""SGLang: the contract of its verification kernels on our `verify`, and an algorithm that uses it.

    python -m sglang.launch_server ... --speculative-algorithm SAGUARO \\
        --speculative-draft-model-path ./llama-1b --speculative-eagle-topk 1

The algorithm is SGLang's own STANDALONE, draft worker and all, whose drafts our kernels verify.
SGLang is imported where it is asked for and nowhere else. Chains only (`topk` 1): a verification
of trees of drafts is not built.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from saguaro_kernels import Draft, Impl, Keys, Sampling
from saguaro_kernels.errors import ConfigError, UnsupportedError
from saguaro_kernels.verification.contract import Inputs
from saguaro_kernels.verification.op import run

from .replace import replace

ALGORITHM = "SAGUARO"
_REPLACED = {
    "tree_speculative_sampling_target_only": "tree_speculative_sampling_target_only",
    "chain_speculative_sampling_triton": "chain_speculative_sampling",
}
"""SGLang's functions and ours of the same signature."""


def register() -> None:
    """Entry point of `sglang.srt.plugins`: adds the algorithm SAGUARO to SGLang's registry.

    Versions without a registry know no SAGUARO; nothing else of them is touched.
    """
    try:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec
    except ImportError:
        return
    if get_spec(ALGORITHM) is not None:
        return
    standalone = SpeculativeAlgorithm.STANDALONE

    class SaguaroAlgorithm(CustomSpecAlgo):
        """Answers every question as STANDALONE does, those of later versions too."""

    def answer(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(standalone, name)(*args, **kwargs)

    for name, member in vars(SpeculativeAlgorithm).items():
        if inspect.isfunction(member) and name[0] != "_" and name != "create_worker":
            setattr(SaguaroAlgorithm, name, answer(name))

    @SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=validate_server_args,
        spec_class=SaguaroAlgorithm,
    )
    def worker(server_args: Any) -> Any:
        made = standalone.create_worker(server_args)
        use_saguaro_verify()
        return made


def validate_server_args(server_args: Any) -> None:
    """Raise ConfigError if the options ask for another distribution than the target's, or trees."""
    for name, wanted in (
        ("speculative_eagle_topk", (None, 1)),
        ("speculative_accept_threshold_single", (None, 1.0)),
        ("speculative_accept_threshold_acc", (None, 1.0)),
    ):
        got = getattr(server_args, name, None)
        if got not in wanted:
            raise ConfigError(f"{name}: got {got}, want {wanted[1]} with {ALGORITHM}")


def use_saguaro_verify() -> list[str]:
    """Replace SGLang's verification wherever it has been imported; returns what was replaced.

    Raises:
        UnsupportedError: none of its modules has it, or one with other arguments.
    """
    replaced = []
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] not in ("sglang", "sgl_kernel"):
            continue
        for name, ours in _REPLACED.items():
            if callable(vars(module).get(name)):
                replace(module, name, globals()[ours])
                replaced.append(f"{path}.{name}")
    if not replaced:
        names = ", ".join(_REPLACED)
        raise UnsupportedError(f"SGLang: none of {names} is imported; another interface")
    return replaced


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    impl: Impl = "auto",
) -> None:
    """Judge chains of certain proposals, as sgl_kernel's function of this name does for topk 1.

    Args:
        predicts: [B * n] int32, out: at the place of a row the token that follows it.
        accept_index: [B, n'] int32, out: places of the root and of the accepted drafts, in order.
        accept_token_num: [B] int32, out: accepted drafts.
        candidates: [B, n] int64: the last token and n - 1 drafts. retrive_index: [B, n] int64,
            the place of each in `predicts`.
        retrive_next_token: [B, n] int64, i + 1, or -1 after a row's last draft.
        uniform_samples, uniform_samples_for_final_sampling: [B, n], [B]: they seed our noise, so
            ranks that share them agree.
        target_probs: [B, n, V] float32. Rows count by their mass.
        retrive_next_sibling, draft_probs, deterministic: accepted, not needed; nothing is written
            to draft_probs.
        threshold_single, threshold_acc: 1, or UnsupportedError: less is not the target's law.
    Cost:
        `verify` and a few ops on [B, n]; no host sync.
    """
    _judge(
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
        (uniform_samples, uniform_samples_for_final_sampling), target_probs, None,
        (threshold_single, threshold_acc), impl,
    )  # fmt: skip


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
    impl: Impl = "auto",
) -> None:
    """Judge chains drawn from draft_probs [B, n - 1 or n, V], as SGLang's function for chains.

    Args:
        block_verification: the block rule, not the token rule; newer versions pass it.
    Everything else as in `tree_speculative_sampling_target_only`.
    """
    _judge(
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
        (uniform_samples, uniform_samples_for_final_sampling), target_probs, draft_probs,
        (threshold_single, threshold_acc), impl, "block" if block_verification else "token",
    )  # fmt: skip


def _judge(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    places: torch.Tensor,
    next_token: torch.Tensor,
    coins: tuple[torch.Tensor, torch.Tensor],
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    thresholds: tuple[float, float],
    impl: Impl,
    rule: str = "token",
) -> None:
    if thresholds != (1.0, 1.0):
        raise UnsupportedError(
            f"thresholds: got {thresholds}, want 1: less is not the target's law"
        )
    num_requests, width = candidates.shape
    ones = torch.ones(num_requests, device=candidates.device)
    step = torch.arange(width, device=candidates.device)
    count = (next_token[:, : width - 1] >= 0).to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)
    tokens = candidates[:, 1:].to(torch.int64)
    logq = None
    if draft_probs is not None:
        draft_probs = draft_probs[:, : width - 1]
        mass = draft_probs.sum(-1, dtype=torch.float32)
        logq = draft_probs.gather(2, tokens.clamp(min=0)[..., None])[..., 0].float().log()
        logq = logq - mass.log()
    first, last = ((coin * 2**24).to(torch.int64) for coin in (coins[0][:, 0], coins[1]))
    verdict = run(
        target_probs,
        Draft(
            tokens.masked_fill(step[:-1] >= count[:, None], -1),
            count,
            draft_probs,
            logq=logq,
            sampling=Sampling(ones),
        ),
        Sampling(ones),
        Keys(first << 24 | last, torch.zeros_like(first)),
        rule=rule,
        inputs=Inputs(target_probs=True, draft_probs=True),
        impl=impl,
    )
    used = step <= verdict.num_accepted[:, None]
    # What lies behind the extra token keeps what it held, as with their kernels.
    before = predicts[places]
    predicts[places] = torch.where(used, verdict.tokens.to(predicts.dtype), before)
    kept = torch.where(used, places.to(accept_index.dtype), -1)[:, : accept_index.shape[1]]
    accept_index[:, : kept.shape[1]] = kept
    accept_token_num.copy_(verdict.num_accepted)
