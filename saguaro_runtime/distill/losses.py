"""What the draft is trained on, per position, given the target's logits there.

    kl      = sum over x of p(x) log(p(x) / q(x))
    rejected = 1 - sum over x of min(p(x), q(x))       = P(a draft from q is rejected by p)

`rejected` is the quantity of interest itself, but its gradient vanishes where q is far from p, so
the divergence is trained first.

Source: Leviathan et al. 2211.17192, Corollary 3.6; Zhou et al. 2310.08461.
"""

from __future__ import annotations

import torch


def distill_losses(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, vocab: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (kl, rejected) of each row, [N] float32 each.

    Args:
        draft_logits: [N, D], any float dtype.
        target_logits: [N, V].
        vocab: [D] int64, the target's id of each of the draft's; None where D = V. Outside them q
            is 0, kl sums over them alone (which may be less than 0), and `rejected` includes the
            target's mass outside.
    """
    log_p = target_logits.float().log_softmax(-1)
    if vocab is not None:
        log_p = log_p[:, vocab]
    log_q = draft_logits.float().log_softmax(-1)
    p = log_p.exp()
    # A probability of 0 adds nothing, and 0 * inf is NaN.
    kl = (p * (log_p.clamp(min=-1e4) - log_q.clamp(min=-1e4))).sum(-1)
    rejected = 1.0 - torch.minimum(p, log_q.exp()).sum(-1)
    return kl, rejected
