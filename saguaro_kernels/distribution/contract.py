"""What describes a row's distribution: `Sampling`, `RowStats`, `Status`, PAD."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

PAD = -1
"""Stands for "no token" wherever ids are stored."""

MIN_TEMPERATURE = 1e-30
"""Positive temperatures below this act as this one, so that 1 / T stays finite."""

MAX_TEMPERATURE = 1e30
"""Those above, and inf, act as this one: allowed ids are equally likely, the others never drawn."""


class Status(enum.IntEnum):
    """What a row of logits was; every row gets a legal id whatever it is."""

    OK = 0
    NAN = 1
    """NaN or +inf somewhere: those entries were taken as -inf."""
    EMPTY = 2
    """No finite logit and no NaN: the row acts as one-hot on id 0."""


@dataclass(frozen=True)
class Sampling:
    """Per row: temperature [R] float32 >= 0 (0 is greedy, inf uniform) and optional filters.

    top_k [R] int32 (<= 0: off), top_p [R] float32 (>= 1: off), min_p [R] float32 (<= 0: off).
    The values lie on the device and are not checked: what is negative or NaN acts as a temperature
    of 0, as a filter that is off; a negative top_p keeps one id.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None


@dataclass(frozen=True)
class RowStats:
    """Per row: max, lse, cutoff [R] float32, argmax, cutoff_id [R] int64, status [R] int32.

    log_sum [R] float32 is lse relative to max (lse = max / T + log_sum), exact at any temperature.
    """

    max: torch.Tensor
    lse: torch.Tensor
    cutoff: torch.Tensor
    argmax: torch.Tensor
    cutoff_id: torch.Tensor
    status: torch.Tensor
    log_sum: torch.Tensor
