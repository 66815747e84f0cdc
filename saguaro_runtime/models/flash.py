"""flash-attn, where `EngineConfig(attention="flash")` asks for it: prompts, verification, on GPUs.

It reads our pages as they are, if a page has 256 slots. Branches keep `tree_attention`: a branch
sees the trunk and its own slots behind those of others, which no causal mask says. The call is that
of flash-attn 2.8.3 and has not run on hardware.
"""

from __future__ import annotations

import torch

from saguaro_kernels.errors import UnsupportedError

from ..config import Attention

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
_HINT = "leave attention out for our own kernel"


def page_size(attention: Attention) -> int:
    """Slots of a page: flash-attn takes multiples of 256, and a small page wastes less."""
    return 256 if attention == "flash" else 64


def check_machine(device: torch.device) -> None:
    """Raise UnsupportedError unless flash-attn is installed and the models lie on a GPU."""
    if device.type != "cuda":
        raise UnsupportedError(f"attention='flash': the target lies on {device}, want a GPU")
    try:
        from flash_attn import flash_attn_with_kvcache  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"attention='flash': flash_attn cannot be imported ({error}); "
            f'pip install "saguaro-ssd[flash]", or {_HINT}'
        ) from error


def check_model(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """Raise UnsupportedError for a model whose keys flash-attn does not take as they are."""
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"attention='flash': {name} is in {dtype}, want bfloat16 or float16; {_HINT}"
        )
    # Other widths it would pad, which copies all pages at every call.
    if head_dim > 256 or head_dim % 8:
        raise UnsupportedError(
            f"attention='flash': {name} has heads of {head_dim}, want a multiple of 8 up to 256; "
            f"{_HINT}"
        )


def attend(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """The attention of chains: query i of a row sees its first lengths - Q + i + 1 slots.

    Args:
        query: [B, Q, Hq, D] bfloat16 | float16, on a GPU.
        key_pages, value_pages: [pages, page_size, Hkv, D]; the new keys are among them.
        page_table: [B, max_pages] int32.
        lengths: [B] int32, slots of a row with the new ones.
        scale: default D ** -0.5. softcap: None for none. window: the last slots seen, the query's
            own among them; None for all.
    Returns:
        [B, Q, Hq, D], as `tree_attention` of the same chains.
    """
    from flash_attn import flash_attn_with_kvcache

    out: torch.Tensor = flash_attn_with_kvcache(
        query,
        key_pages,
        value_pages,
        cache_seqlens=lengths,
        block_table=page_table,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out
