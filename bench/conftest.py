"""`pytest bench --benchmark-only` measures in one process, alone."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know the option without the plugin too, to say what is missing."""
    if not pluginmanager.hasplugin("benchmark"):
        parser.addoption("--benchmark-only", action="store_true", help="needs pytest-benchmark")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Undo `-n 2`: pytest-benchmark turns itself off beside other processes."""
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("pytest-benchmark is not here: pip install pytest-benchmark")
    if getattr(config.option, "benchmark_only", False):
        config.option.numprocesses, config.option.dist, config.option.tx = 0, "no", []
