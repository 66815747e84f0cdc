"""A paged key-value store: pages are counted, handed to a row once and freed once."""

from __future__ import annotations

import math

import torch

from saguaro_kernels.errors import ConfigError

from ..transfer import send


class PagedKV:
    """Keys and values of all layers for up to `rows` requests of different lengths.

    Slot j of row r lies in page page_table[r, j // page_size] at j % page_size. Unused entries of
    the page table are 0, so a gather over the whole table never leaves the pool.

    On a GPU there are one page and one row more than asked for, which no request gets: `spare_row`
    writes to that page, and so can pad a batch to the size of a captured graph.

    Attributes:
        data: [layers, 2, pages, page_size, kv_heads, head_dim]; index 1 is key (0) or value (1).
        page_table: [rows, max_pages] int32.
        spare_row: None on a CPU.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        tokens: int,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`tokens`: slots of the whole pool, rounded up to pages.

        Raises:
            ConfigError: the device has less memory.
        """
        pages = -(-tokens // page_size)
        self.page_size = page_size
        self.spare_row = None if torch.device(device).type == "cpu" else rows
        spare = int(self.spare_row is not None)
        shape = (layers, 2, pages + spare, page_size, kv_heads, head_dim)
        try:
            # Zeros, not empty: padded slots are read and masked, and NaN times 0 is NaN.
            self.data = torch.zeros(shape, dtype=dtype, device=device)
            self.page_table = torch.zeros(rows + spare, pages, dtype=torch.int32, device=device)
            self.page_table[rows:] = pages
        except RuntimeError as error:
            size = (math.prod(shape) * dtype.itemsize + 4 * rows * pages) / 2**30
            raise ConfigError(
                f"KV cache: {tokens} slots of {rows} rows take {size:.1f} GiB, which is more than "
                "there is; lower EngineConfig(max_tokens=...) or max_batch"
            ) from error
        self._free = list(range(pages))
        self._held: dict[int, list[int]] = {}

    @property
    def free_tokens(self) -> int:
        """Slots that can still be handed out."""
        return len(self._free) * self.page_size

    def allocate(self, row: int, tokens: int) -> None:
        """Give `row` pages for `tokens` slots.

        Raises:
            ConfigError: the row already holds pages, or too few are free.
        """
        if row in self._held:
            raise ConfigError(f"row {row}: already holds pages; release it first")
        count = -(-tokens // self.page_size)
        if count > len(self._free):
            raise ConfigError(
                f"KV cache: row {row} wants {tokens} slots, {self.free_tokens} are free; "
                "raise EngineConfig(max_tokens=...) or lower max_new_tokens"
            )
        # Lowest pages first: neighbours in memory, so a row alone is one slice of the pool.
        self._free.sort()
        pages, self._free = self._free[:count], self._free[count:]
        self._held[row] = pages
        self.page_table[row].zero_()
        table = torch.tensor(pages, dtype=torch.int32)
        self.page_table[row, :count] = send(self.page_table.device, table)[0]

    def release(self, row: int) -> None:
        """Take the pages of `row` back.

        Raises:
            ConfigError: the row holds none (a second release).
        """
        if row not in self._held:
            raise ConfigError(f"row {row}: holds no pages")
        self._free.extend(self._held.pop(row))

    def table(self, rows: torch.Tensor) -> torch.Tensor:
        """The page tables of `rows` [B], cut to the widest of them: [B, pages] int32.

        On a GPU they are whole: `rows` cannot be read without waiting, and a captured graph must
        not depend on who holds pages.
        """
        if self.spare_row is not None:
            return self.page_table[rows]
        widest = max(len(self._held[row]) for row in rows.tolist())
        return self.page_table[rows, :widest]
