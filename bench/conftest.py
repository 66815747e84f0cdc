"""`pytest bench --benchmark-only` measures in one process, alone."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Undo `-n 2`: pytest-benchmark turns itself off beside other processes."""
    if getattr(config.option, "benchmark_only", False):
        config.option.numprocesses, config.option.dist, config.option.tx = 0, "no", []
