"""Batched sampling of rows: plain, or with the F largest ids scaled by C ("downweight").

    token = argmax over x of log q(x) + g(x),   g = Gumbel noise of (seed, base, offset, stream, x)

A sampled row is the argmax of log q + noise, so one pass over the row gives the token, its log q,
the row's lse and the largest ids, which are also the candidates of outcome prediction. Scaling the
F largest ids by C < 1 makes them likelier to be the extra token, which a drafter then predicts.

Source: Gumbel-max, Maddison et al. 1411.0030; C is Definition 14 of 2603.03251.
"""

from __future__ import annotations

from typing import Any

import torch

from .._call import call
from .._launch import Impl, check_int, check_out, check_tensor, check_workspace, resolve_impl
from ..distribution import (
    Sampling,
    check_keys,
    check_per_row,
    check_rows,
    contiguous,
    copy_fields,
)
from ..distribution.launch import MAX_LIST, Draw, ScanOutputs, row_scan_launch, scan_workspace_size
from ..errors import ConfigError
from ..rng import Keys, Stream
from .contract import Sample
from .geometric import sample_geometric
from .reference import saguaro_sample_reference

__all__ = [
    "Sample",
    "saguaro_sample",
    "saguaro_sample_reference",
    "sample_geometric",
    "sample_workspace_size",
]

sample_workspace_size = scan_workspace_size

_OUT_TYPES = {
    "tokens": torch.int64,
    "logq": torch.float32,
    "lse": torch.float32,
    "cutoff": torch.float32,
    "scale_logit": torch.float32,
    "cutoff_id": torch.int64,
    "scale_id": torch.int64,
    "top_ids": torch.int64,
    "top_logits": torch.float32,
    "status": torch.int32,
}
"""Types of a Sample's fields."""


def saguaro_sample(
    logits: torch.Tensor,
    sampling: Sampling,
    keys: Keys,
    *,
    offset: torch.Tensor | int,
    stream: Stream = Stream.DRAFT,
    top_f: int = 0,
    scale_f: int = 0,
    downweight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    scheme: str = "plain",
    target_logits: torch.Tensor | None = None,
    target_sampling: Sampling | None = None,
    impl: Impl = "auto",
    out: Sample | None = None,
    workspace: torch.Tensor | None = None,
) -> Sample:
    """Draw one token per row, and describe the distribution it was drawn from.

        plain        q = softmax(z / T) over the kept ids,  z = logits + bias
        downweight   q proportional to (C if x is among the F largest kept ids else 1) exp(z[x] / T)
        geometric    q proportional to sqrt(q_plain max(r, 1e-8)),  r = (p - q_plain)+ / its sum

    Args:
        logits: [R, V] float16 | bfloat16 | float32; last dimension contiguous. Natural log.
        sampling: temperature (0 is greedy) and filters, [R] each.
        keys: seed, base [R]. Rows of equal keys and offset share their noise.
        offset: position within the round: an int in 0..2^24 - 1, or [R] int32 | int64, of which the
            lower 24 bits count.
        stream: family of random numbers; DRAFT for a drafter.
        top_f: how many of the largest kept ids to return, at most 128 (0: none).
        scale_f: F, the size of the scaled set; any size.
        downweight: [R] float32, C in [0, 1], clamped to it. If every kept id would be scaled, C is
            ignored.
        bias: [R, V], added to the logits first; -inf forbids an id.
        ids: [V] int64, ascending: the id of each column, where the rows are of a part of a larger
            vocabulary. Noise, `tokens` and `top_ids` are by these ids, cutoff_id and scale_id by
            column (as `Draft.vocab_map` has them). Default: the columns' numbers.
        scheme: "plain", "downweight" or "geometric". The last takes target_logits [R, V], and
            target_sampling (default: sampling); `sample_geometric` also returns the row of q.
        out: tensors to write and return. workspace: int64, `sample_workspace_size`. Default: new.
    Returns:
        Sample. Every row gets an id in 0..V-1, whatever its logits; a row with status NAN is drawn
        from its other entries, an EMPTY one gets id 0 as a deterministic proposal.
    Raises:
        ShapeError, DTypeError, DeviceError: of any argument. ConfigError: scheme, offset, stream,
        top_f, scale_f, or what belongs to another scheme. Values are not checked on the device; see
        `Sampling` and status.
    Cost:
        Each row read once in 2 launches, at most 4 % more for F <= 32 of 128k ids. Filters: a
        launch and 2 or 3 reads more, and so does scale_f > 128. 0 host syncs.
    Source:
        arXiv 2603.03251, Definition 14.
    """
    implementation = resolve_impl(impl, logits.device)
    _check_options(scheme, top_f, scale_f, downweight, target_logits)
    if target_logits is None and target_sampling is not None:
        raise ConfigError("target_sampling: got it without target_logits, want both or neither")
    if target_logits is not None:
        if any(value is not None for value in (bias, ids, out, workspace)):
            raise ConfigError("bias, ids, out, workspace: want None with scheme='geometric'")
        sample, _ = sample_geometric(
            logits, target_logits, sampling, keys, offset=offset, target_sampling=target_sampling,
            stream=stream, top_f=top_f, impl=implementation,
        )  # fmt: skip
        return sample
    check_rows(logits, sampling, bias)
    offsets = check_keys(keys, offset, stream, logits)
    check_per_row("downweight", downweight, logits.shape[0], torch.float32, logits)
    if ids is not None:
        check_tensor("ids", ids, (logits.shape[1],), torch.int64, logits.device)
    if out is None:
        out = _empty_sample(logits, top_f)
    else:
        for name, dtype in _OUT_TYPES.items():
            shape = _out_shape(name, logits.shape[0], top_f)
            check_out(f"out.{name}", getattr(out, name), shape, dtype, logits.device)
    if workspace is not None:
        size = sample_workspace_size(logits.shape[0], logits.shape[1], top_f, scale_f)
        check_workspace(workspace, size, torch.int64, logits.device)
    call(
        "saguaro_sample",
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, keys.seed,
        keys.base, offsets, 0 if offsets is not None else int(offset), int(stream), scale_f,
        downweight, bias, ids, implementation, *vars(out).values(), workspace,
    )  # fmt: skip
    return out


def _check_options(
    scheme: str,
    top_f: int,
    scale_f: int,
    downweight: torch.Tensor | None,
    target_logits: torch.Tensor | None,
) -> None:
    if scheme not in ("plain", "downweight", "geometric"):
        raise ConfigError(f"scheme: got {scheme!r}, want 'plain', 'downweight' or 'geometric'")
    if (scheme == "geometric") != (target_logits is not None):
        raise ConfigError(
            f"target_logits: got {'a tensor' if target_logits is not None else None} with scheme="
            f"{scheme!r}; scheme='geometric' takes two rows, and only it"
        )
    if (scheme == "downweight") != (downweight is not None):
        raise ConfigError(
            f"downweight: got {'a tensor' if downweight is not None else None} with scheme="
            f"{scheme!r}; pass C with scheme='downweight', and only there"
        )
    check_int("top_f", top_f, 0, MAX_LIST)
    check_int("scale_f", scale_f, 0)
    if scale_f > 0 and scheme != "downweight":
        raise ConfigError(
            f"scale_f: got {scale_f} with scheme={scheme!r}, want scheme='downweight'"
        )


def _empty_sample(logits: torch.Tensor, top_f: int) -> Sample:
    fields = {
        name: logits.new_empty(_out_shape(name, logits.shape[0], top_f), dtype=dtype)
        for name, dtype in _OUT_TYPES.items()
    }
    return Sample(**fields)


def _out_shape(name: str, rows: int, top_f: int) -> tuple[int, ...]:
    return (rows, top_f) if name.startswith("top_") else (rows,)


def _saguaro_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seed: torch.Tensor,
    base: torch.Tensor,
    offsets: torch.Tensor | None,
    offset: int,
    stream: int,
    scale_f: int,
    downweight: torch.Tensor | None,
    bias: torch.Tensor | None,
    ids: torch.Tensor | None,
    impl: str,
    *tensors: Any,
) -> None:
    """saguaro::saguaro_sample; `tensors` are the Sample's and the workspace, or None for it."""
    *fields, workspace = tensors
    sampling, out = Sampling(temperature, top_k, top_p, min_p), Sample(*fields)
    if impl == "reference":
        result = saguaro_sample_reference(
            logits, sampling, Keys(seed, base), offset=offset if offsets is None else offsets,
            stream=Stream(stream), top_f=out.top_ids.shape[1], scale_f=scale_f,
            downweight=downweight, bias=bias, ids=ids,
        )  # fmt: skip
        copy_fields(result, out)
        return
    draw = Draw(
        seed.contiguous(), base.contiguous(),
        None if offsets is None else offsets.contiguous(), offset, stream,
        None if ids is None else ids.contiguous(),
    )  # fmt: skip
    row_scan_launch(
        logits,
        contiguous(sampling),
        ScanOutputs(**vars(out)),
        draw=draw,
        scale_f=scale_f,
        downweight=None if downweight is None else downweight.contiguous(),
        bias=bias,
        workspace=workspace,
    )
