"""What a distillation is asked to do, and the files of one that has begun."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from saguaro_kernels.errors import ConfigError, SaguaroError

from ..config import check_number

DTYPES = ("auto", "bfloat16", "float32")
DEVICES = ("auto", "cpu", "cuda")
LAYERS = 4


@dataclass(frozen=True)
class Settings:
    """Options of a distillation.

    Args:
        layers: which of the target's layers the draft starts from, or how many: half of them the
            first ones, half the last.
        draft_vocab: ids that the draft has logits for, the most frequent ones of the texts; the
            head is much of a small draft's time. None: all of the target's.
        draft: folder of a draft to go on from, with the layers and ids that it has.
        minutes: time for sampling and training together; measured at the start, it fixes how many
            texts are sampled and how many steps are trained. The report takes a little more.
        texts: number of texts instead of `minutes`; every run then gives the same draft.
        prompts: a file, see `read_prompts`; None: the target makes up its questions.
        seed: of everything random.
        dtype: of the products; "auto" is what this processor multiplies faster, bfloat16 on a GPU.
        device: "auto" is a GPU where there is one.
        max_new_tokens: longest answer.
        learning_rate: its peak; None: 0.6 / the hidden size, a third of that with `draft`.

    Raises:
        ConfigError: a value is outside its range.
    """

    layers: int | tuple[int, ...] = LAYERS
    draft_vocab: int | None = None
    draft: str | None = None
    minutes: float = 10.0
    texts: int | None = None
    prompts: str | None = None
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 160
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        for name, choices in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: got {getattr(self, name)!r}, want one of {choices}")
        for name, default in (("layers", LAYERS), ("draft_vocab", None)):
            if self.draft is not None and getattr(self, name) != default:
                raise ConfigError(
                    f"{name}: got {getattr(self, name)} and draft {self.draft!r}, which has its own"
                )
        for name in ("draft_vocab", "texts", "max_new_tokens", "minutes", "learning_rate"):
            if (value := getattr(self, name)) is not None or name in ("max_new_tokens", "minutes"):
                whole = name not in ("minutes", "learning_rate")
                check_number(name, value, int(whole), 10**9, whole=whole, above=not whole)
        check_number("seed", self.seed, -(2**63), 2**63 - 1, whole=True)


class Work:
    """The folder of a distillation: `out` itself, and what it needs until it is done in `.distill`.

    settings.json and plan.json say what it does, chunk-*.safetensors are texts, student is the
    draft it begins with and checkpoint.pt the training so far.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / ".distill"
        self.report = out / "distill.json"
        self.settings, self.plan = self.folder / "settings.json", self.folder / "plan.json"
        self.student, self.checkpoint = self.folder / "student", self.folder / "checkpoint.pt"

    def chunk(self, number: int) -> Path:
        return self.folder / f"chunk-{number:05d}.safetensors"

    def stored(self) -> dict[str, Any]:
        """The settings it was begun with, and its target; {} where nothing was begun."""
        for file in (self.settings, self.report):
            if file.is_file():
                settings: dict[str, Any] = read_json(file)["settings"]
                if isinstance(settings["layers"], list):
                    settings["layers"] = tuple(settings["layers"])
                return settings
        return {}

    @contextlib.contextmanager
    def begun(self, target: str, settings: Settings, *, resume: bool) -> Iterator[None]:
        """Inside, the folder is this run's alone: made, or to be resumed with the same settings.

        Raises:
            ConfigError: `resume` is not set, settings differ, another run is at work in the folder,
                or it holds something else.
        """
        if self.report.is_file():
            self._check(target, settings, resume)
            yield
            return
        if not self.stored() and self.out.exists() and not self._is_empty():
            raise ConfigError(f"out: {self.out} is not an empty folder, and none of a distillation")
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"out: another run is at work in {self.out}") from error
            self._check(target, settings, resume)
            yield

    def _is_empty(self) -> bool:
        """Whether nothing but a run that ended before it wrote anything has been here."""
        return self.out.is_dir() and all(entry == self.folder for entry in self.out.iterdir())

    def _check(self, target: str, settings: Settings, resume: bool) -> None:
        """See that the settings are those that it was begun with, or begin with them."""
        wanted = {"target": target} | dataclasses.asdict(settings)
        if stored := self.stored():
            if not resume:
                raise ConfigError(
                    f"out: {self.out} holds a distillation already; resume it with --resume, or "
                    "choose another folder"
                )
            differing = [name for name, value in wanted.items() if stored.get(name) != value]
            if differing:
                name = differing[0]
                raise ConfigError(
                    f"{name}: got {wanted[name]!r}, but {self.out} was begun with "
                    f"{stored.get(name)!r}"
                )
            return
        write_json(self.settings, {"settings": wanted})

    def end(self, report: dict[str, Any]) -> None:
        """Write the report and delete the intermediate files."""
        write_json(self.report, {"settings": self.stored()} | report)
        shutil.rmtree(self.folder)


def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Inside, the file to write instead of `path`, which only exists when it is complete.

    Raises:
        SaguaroError: it cannot be written; what was there before still is.
    """
    part = path.with_suffix(".part")
    try:
        yield part
        part.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:  # of files, of torch, of safetensors
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise SaguaroError(
            f"{path}: cannot be written ({error}); mend that, and go on with --resume"
        ) from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    with written(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
