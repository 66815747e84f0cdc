"""A whole distillation: texts, training, the draft's folder, the report. It can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from saguaro_kernels.errors import ConfigError

from ..build import stop_ids_of
from ..cli.doctor import faster_dtype
from ..cli.generate import encode
from ..devices import device_of
from ..models.draft import DRAFT_VOCAB
from ..models.gguf import folder_of
from ..models.loading import (
    check_same_tokenizer,
    explained,
    load_draft,
    load_model,
    load_tokenizer,
)
from .measure import measure
from .progress import Interruptions, Progress, say
from .prompts import read_prompts, split_prompts
from .settings import Settings, Work, read_json, write_json
from .student import check_start, copy_student, student_config, student_weights, write_student
from .texts import Text, Writer, frequent_ids, is_chunk, load_chunk, save_chunk
from .train import Trainer

CHUNK = 16
"""Texts sampled at once."""
BATCH = 8
PASSES = 4
"""Times that training goes over the texts."""
REPORTED = 8
"""Held-out prompts that the report is measured on."""
NEW_TOKENS = 48
_CHECKPOINT_S = 120.0
_USUAL = Settings()


def distill(
    target: str,
    out: str | Path,
    settings: Settings = _USUAL,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Train a draft for `target` and write it to the folder `out`; returns the report.

    A draft is some of the target's own layers, trained on its own text towards its own logits. It
    has no embedding and no head of its own: it is loaded beside its target. `settings.draft` is one
    that is trained further.

    Args:
        target: a transformers folder, a GGUF file or a hub name; see `FAMILIES` for what it may be.
        resume: continue an interrupted run in `out`, if there is one. The result is that of an
            uninterrupted run (same machine, same number of threads).
    Raises:
        UnsupportedError: a target of another family, before any work.
        ConfigError: settings that do not fit the target or those of the run to be resumed, a folder
            that holds something else or in which another run is at work.
        SaguaroError: a file cannot be written; the run can be resumed.
    """
    folder = folder_of(target)
    config = _config_of(folder)
    layers = check_start(config, settings.layers, settings.draft)
    if settings.draft_vocab is not None and settings.draft_vocab >= config.vocab_size:
        raise ConfigError(
            f"draft_vocab: got {settings.draft_vocab}, want fewer than the target's "
            f"{config.vocab_size}"
        )
    if settings.device == "cuda":
        device_of("device", "cuda")
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and settings.max_new_tokens >= most:
        raise ConfigError(
            f"max_new_tokens: got {settings.max_new_tokens}, want fewer than the target's {most}"
        )
    prompts = None
    if settings.prompts is not None:
        prompts = split_prompts(read_prompts(settings.prompts), settings.seed)
    work = Work(Path(out))
    with work.begun(target, settings, resume=resume):
        if work.report.is_file():
            return read_json(work.report)
        return _Run(folder, config.dtype, settings, layers, prompts, work).run()


class _Run:
    def __init__(
        self,
        target: str,
        stored_dtype: torch.dtype | None,
        settings: Settings,
        layers: tuple[int, ...],
        prompts: Any,
        work: Work,
    ) -> None:
        self.settings, self.work, self.layers = settings, work, layers
        self.plan = read_json(work.plan) if work.plan.is_file() else {}
        if not self.plan:
            device = settings.device
            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = settings.dtype
            if dtype == "auto":
                dtype = faster_dtype() if device == "cpu" else "bfloat16"
            self.plan = {"device": device, "dtype": dtype, "layers": list(layers)}
        self.dtype = getattr(torch, self.plan["dtype"])
        say(f"loading {target}")
        disable_progress_bar()  # transformers' own
        self.tokenizer = load_tokenizer(target)
        if settings.draft is not None:
            check_same_tokenizer(settings.draft, self.tokenizer)
        self.target = load_model(target, self.dtype).to(self.plan["device"])
        self.stored_dtype = stored_dtype or self.dtype
        self.vocab_size = self.target.get_output_embeddings().weight.shape[0]
        self.stop_ids = stop_ids_of(self.target, self.tokenizer)
        self.writer = Writer(
            self.target,
            self.tokenizer,
            prompts=prompts,
            seed=settings.seed,
            size=CHUNK,
            max_new_tokens=settings.max_new_tokens,
            stop_ids=self.stop_ids,
            # A GPU runs the target again faster than a disk stores all its states.
            keep_hidden=self.plan["device"] == "cpu",
        )

    def run(self) -> dict[str, Any]:
        with Interruptions() as interruptions:
            try:
                self._prepare(interruptions.raise_noted)
                trainer = self._train(interruptions)
            except (KeyboardInterrupt, SystemExit):
                say(f"\nwhat is done so far is in {self.work.folder}; go on with --resume")
                raise
        weights = {name: weight.to(self.stored_dtype) for name, weight in trainer.weights.items()}
        if trainer.vocab is not None:
            weights[DRAFT_VOCAB] = trainer.vocab
        config = AutoConfig.from_pretrained(self.work.student)
        config.dtype = self.stored_dtype
        write_student(self.work.out, config, weights, self.tokenizer)
        report = {"plan": self.plan, "measured": self._measure()}
        self.work.end(report)
        return read_json(self.work.report)

    def _prepare(self, check: Callable[[], None]) -> None:
        """The held-out texts, and by the time they and a step take, the amount of all work."""
        if self.work.plan.is_file():
            return
        say("sampling the held-out texts")
        start = time.monotonic()
        held_out = self.writer.chunk(0, check)
        chunk_s = time.monotonic() - start
        save_chunk(self.work.chunk(0), held_out)
        step_s = self._step_seconds(held_out)
        steps = CHUNK * PASSES // BATCH
        if self.settings.texts is None:
            left = 60 * self.settings.minutes - (time.monotonic() - start)
            chunks = max(1, int(left / (chunk_s + steps * step_s)))
        else:
            chunks = -(-self.settings.texts // CHUNK)
        self.plan |= {"chunks": chunks, "chunk_s": chunk_s, "step_s": step_s}
        write_json(self.work.plan, self.plan)

    def _train(self, interruptions: Interruptions) -> Trainer:
        """Sample the texts and train on them, from wherever an earlier run was cut off."""
        plan, check = self.plan, interruptions.raise_noted
        chunks, chunk_s, step_s = plan["chunks"], plan["chunk_s"], plan["step_s"]
        numbers = range(1, chunks + 1)
        total_s = chunks * (chunk_s + CHUNK * PASSES // BATCH * step_s)
        there = sum(is_chunk(self.work.chunk(number)) for number in numbers)
        with Progress(total_s, there * chunk_s) as progress:
            for number in (0, *numbers):
                if not is_chunk(self.work.chunk(number)):
                    progress.show("sampling", (number - 1) * chunk_s, f", {number}/{chunks}")
                    save_chunk(self.work.chunk(number), self.writer.chunk(number, check))
                check()
            trainer = self._trainer(self._texts(numbers))
            trainer.load(self.work.checkpoint)
            saved_s, loss = time.monotonic(), float("nan")
            while trainer.step < trainer.steps:
                loss = trainer.advance()
                done_s = chunks * chunk_s + trainer.step * step_s
                note = f", step {trainer.step}/{trainer.steps}, loss {loss:.3f}"
                progress.show("training", done_s, note)
                due = time.monotonic() - saved_s > _CHECKPOINT_S
                if due or interruptions.noted or trainer.step == trainer.steps:
                    trainer.save(self.work.checkpoint)
                    saved_s = time.monotonic()
                check()
        return trainer

    def _texts(self, numbers: range) -> list[Text]:
        """The texts to train on; those that answer a held-out prompt are not among them."""
        held_out = {text.prompt for text in load_chunk(self.work.chunk(0))}
        found = [text for number in numbers for text in load_chunk(self.work.chunk(number))]
        new = [text for text in found if text.prompt not in held_out]
        if not new:
            raise ConfigError(
                f"texts: all {len(found)} answer held-out prompts; ask for more texts, or give "
                "more --prompts"
            )
        return new

    def _trainer(self, texts: list[Text]) -> Trainer:
        usual = 0.6 / self.target.config.hidden_size
        if self.settings.draft is not None:
            usual /= 3
            copy_student(self.settings.draft, self.work.student)
        else:
            weights = student_weights(self.target, self.layers)
            if self.settings.draft_vocab is not None:
                weights[DRAFT_VOCAB] = frequent_ids(
                    texts, self.settings.draft_vocab, self.vocab_size, self.stop_ids
                )
            config = student_config(self.target.config, self.layers)
            write_student(self.work.student, config, weights, None)
        draft = load_draft(str(self.work.student), self.target, torch.float32)
        return Trainer(
            draft.to(self.target.device),
            self.target,
            texts,
            steps=max(1, self.plan.get("chunks", 1) * CHUNK * PASSES // BATCH),
            batch=BATCH,
            learning_rate=self.settings.learning_rate or usual,
            seed=self.settings.seed,
            dtype=self.dtype,
        )

    def _step_seconds(self, texts: list[Text]) -> float:
        """Seconds of a step's gradients; no step is taken."""
        trainer = self._trainer(texts)
        for _ in range(2):  # the first one also warms up
            start = time.monotonic()
            trainer.accumulate(texts[:BATCH])
            seconds = time.monotonic() - start
        return seconds

    def _measure(self) -> dict[str, Any]:
        say("measuring the draft")
        held_out = dict.fromkeys(text.prompt for text in load_chunk(self.work.chunk(0)))
        prompts = [encode(self.tokenizer, prompt.text, chat=prompt.chat) for prompt in held_out]
        target = self.target.to("cpu")  # where the runtime runs
        draft = load_draft(str(self.work.out), target, target.dtype)
        return measure(
            target, draft, prompts[:REPORTED], seed=self.settings.seed, new_tokens=NEW_TOKENS
        )


def _config_of(target: str) -> Any:
    with explained(f"target {target!r}", "want a transformers folder"):
        return AutoConfig.from_pretrained(target)
