"""The reference is made of docstrings: every public name has one, and an op's says all it must."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import saguaro_kernels
from saguaro_kernels import compat

PAGE = (Path(saguaro_kernels.__file__).parents[1] / "CONTRIBUTING.md").read_text()
COMMAND = re.search(r"^pdoc .*? site ((?:.*\\\n)*.*)", PAGE, re.MULTILINE)
MODULES = subprocess.run(
    ["bash", "-c", f"echo {COMMAND[1]}"], capture_output=True, text=True, check=True
).stdout.split()  # type: ignore[index]
"""Those of the page's command."""


def public(module: str) -> list[tuple[str, Any]]:
    """(name, object) of what a module defines or lists."""
    its = importlib.import_module(module)
    listed = getattr(its, "__all__", None)
    return [
        (name, getattr(its, name))
        for name in listed or vars(its)
        if listed or getattr(vars(its)[name], "__module__", None) == module and name[0] != "_"
    ]


def undocumented(name: str, its: Any) -> list[str]:
    """A class or function without a docstring of its own, and such methods."""
    if not (inspect.isclass(its) or inspect.isfunction(its)):
        return []  # constants and type aliases: a text below them is no attribute of theirs
    doc = its.__doc__ or ""
    made_up = dataclasses.is_dataclass(its) and doc.startswith(f"{its.__name__}(")
    return [name] if made_up or not doc.strip() else []


def ops() -> list[Callable[..., Any]]:
    """Public functions of tensors: they let one choose between kernel and reference."""
    found = [its for _, its in public("saguaro_kernels") + public("saguaro_kernels.compat")]
    functions = [its for its in found if inspect.isfunction(its)]
    return [function for function in functions if "impl" in inspect.signature(function).parameters]


def sections(doc: str) -> dict[str, str]:
    """Heading -> text, indented as it stands."""
    parts = re.split(r"^    (\w+):\n", doc + "\n", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(text: str) -> dict[str, str]:
    """Names -> description of each entry of Args. Names that share one are told apart by commas."""
    return dict(re.findall(r"^        (\w[\w, ]*):((?:.*\n)(?: {10,}.*\n)*)", text, re.MULTILINE))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module: str) -> None:
    assert (importlib.import_module(module).__doc__ or "").strip(), module
    names = public(module)
    assert names
    assert not [missing for name, its in names for missing in undocumented(name, its)]


def test_ops_are_found() -> None:
    names = {its.__name__ for its in ops()}
    assert names >= {"verify", "saguaro_sample", "tree_layout", "ngram_propose", "residual"}
    assert compat.rejection_sample in ops()


@pytest.mark.parametrize("op", ops(), ids=lambda its: its.__name__)
def test_an_op_says_what_it_takes_gives_raises_and_costs(op: Callable[..., Any]) -> None:
    its = sections(op.__doc__ or "")
    # Promotion returns nothing and changes its first argument in place: Args says so.
    in_place = saguaro_kernels.promote_branch, saguaro_kernels.promote_pages
    wanted = {"Args", "Raises", "Cost"} | (set() if op in in_place else {"Returns"})
    assert wanted <= its.keys()
    for name, parameter in inspect.signature(op).parameters.items():
        if name == "impl":  # the same everywhere: "auto", "triton" or "reference"
            continue
        assert re.search(rf"\b{name}\b", its["Args"]), f"{name}: not described"
        entry = entries(its["Args"]).get(name)
        # The annotations are texts: "torch.Tensor | None". Else it shares another's entry.
        if entry and parameter.annotation == "torch.Tensor":
            assert re.search(r"\[.*\]|as for", entry), f"{name}: no shape"
    assert "Error" in its["Raises"] and re.search(r"\d|once", its["Cost"])


def test_ops_out_of_papers_cite_them() -> None:
    for op in (saguaro_kernels.verify, saguaro_kernels.saguaro_sample, saguaro_kernels.residual):
        module = inspect.getmodule(op).__doc__ or ""  # type: ignore[union-attr]
        assert "Source" in sections(op.__doc__ or "") and re.search(r"\d{4}\.\d{5}", module)
