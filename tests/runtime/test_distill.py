"""A draft of the target's own layers: what is sampled, what is learned, how it is resumed."""

from __future__ import annotations

import io
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

from saguaro_kernels.errors import ConfigError, SaguaroError, UnsupportedError
from saguaro_runtime import Engine, EngineConfig, SamplingParams, cli
from saguaro_runtime.distill import Settings, distill, measure, run, student, texts
from saguaro_runtime.distill.losses import distill_losses
from saguaro_runtime.distill.progress import Progress
from saguaro_runtime.distill.prompts import Prompt, invent_prompts, read_prompts, split_prompts
from saguaro_runtime.distill.sampling import complete
from saguaro_runtime.distill.settings import Work
from saguaro_runtime.distill.student import (
    FAMILIES,
    check_draft,
    choose_layers,
    student_config,
    student_weights,
    write_student,
)
from saguaro_runtime.distill.texts import Text, Writer, frequent_ids, load_chunk, save_chunk
from saguaro_runtime.distill.train import Trainer
from saguaro_runtime.models.draft import DRAFT_VOCAB
from saguaro_runtime.models.loading import load_draft, load_model

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model(kind: str, **options: Any) -> transformers.PreTrainedModel:
    """A tiny random model of a family, three layers, over the byte tokenizer's ids."""
    torch.manual_seed(1)
    sizes = {
        "vocab_size": tiny_models.VOCAB, "hidden_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 2, "max_position_embeddings": 256, "pad_token_id": tiny_models.PAD,
        "eos_token_id": tiny_models.EOS, "bos_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    if kind != "gpt2":
        sizes |= {"intermediate_size": 24, "num_key_value_heads": 1}
    config = transformers.AutoConfig.for_model(kind, **(sizes | options))
    its: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return its.eval()


def save(folder: Path, kind: str, template: str | None = None) -> str:
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template
    model(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Few texts at once, and a short report."""
    for name, value in (("CHUNK", 4), ("BATCH", 2), ("REPORTED", 1), ("NEW_TOKENS", 4)):
        patch.setattr(run, name, value)
    patch.setattr(texts, "QUESTION_TOKENS", 6)
    patch.setattr(measure, "TEMPERATURES", (0.0, 1.0))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no report at all, unless a test wants one."""
    make_small(monkeypatch)
    monkeypatch.setattr(run, "measure", lambda *_, **__: {"was": "measured"})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "llama", TEMPLATE)


SETTINGS = Settings(layers=2, texts=8, dtype="float32", device="cpu", max_new_tokens=6)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distillation that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        report = distill(llama, out, SETTINGS)
    assert report["plan"]["chunks"] == 2
    return out


# What is learned.


def test_losses_are_the_sums_they_name() -> None:
    torch.manual_seed(0)
    z, w = torch.randn(3, 5) * 3, torch.randn(3, 5) * 3
    z[0, 2], w[1, 4] = -torch.inf, -torch.inf
    kl, refused = distill_losses(z, w)
    for row in range(3):
        q, p = z[row].softmax(-1).tolist(), w[row].softmax(-1).tolist()
        assert float(refused[row]) == pytest.approx(1 - sum(map(min, p, q)), abs=1e-6)
        pairs = [(a, b) for a, b in zip(p, q, strict=True) if a > 0]
        if row:
            wanted = sum(a * math.log(a / b) for a, b in pairs)
            assert float(kl[row]) == pytest.approx(wanted, rel=1e-5)
        else:
            assert 100 < float(kl[row]) < math.inf  # q = 0 where p is not


def test_losses_of_a_smaller_vocabulary_count_the_mass_outside_as_refused() -> None:
    torch.manual_seed(0)
    vocab, w = torch.tensor([1, 3, 4]), torch.randn(2, 6)
    p = w.softmax(-1)[:, vocab]
    best = (p / p.sum(-1, keepdim=True)).log().requires_grad_()
    kl, refused = distill_losses(best, w, vocab)
    assert torch.allclose(refused, 1 - p.sum(-1), atol=1e-6)
    # The target's own law, cut to these ids, is where the divergence is least.
    kl.sum().backward()
    assert float(best.grad.abs().max()) < 1e-6


def test_training_lowers_the_loss_whether_states_are_kept_or_not(
    llama: str, tmp_path: Path
) -> None:
    target = load_model(llama, torch.float32)
    losses = {}
    for kept in (True, False):
        some = writer(target, keep_hidden=kept).chunk(1, lambda: None)
        write_student(
            tmp_path, student_config(target.config, (0, 2)), student_weights(target, (0, 2)), None
        )
        draft = load_draft(str(tmp_path), target, torch.float32)
        before = target.get_output_embeddings().weight.clone()
        trainer = Trainer(
            draft, target, some, steps=24, batch=4, learning_rate=0.02, seed=0, dtype=torch.float32
        )
        losses[kept] = [trainer.advance() for _ in range(12)]  # of the divergence alone
        assert torch.equal(before, target.get_output_embeddings().weight)
    assert sum(losses[True][-3:]) < 0.7 * sum(losses[True][:3])
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)


def test_parts_of_the_rows_give_the_gradient_of_all(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_model(llama, torch.float32)
    some = writer(target).chunk(1, lambda: None)
    write_student(
        tmp_path, student_config(target.config, (0,)), student_weights(target, (0,)), None
    )
    found = []
    for rows in (1 << 20, 3):
        monkeypatch.setattr("saguaro_runtime.distill.train._ROWS_AT_ONCE", rows)
        draft = load_draft(str(tmp_path), target, torch.float32)
        trainer = Trainer(
            draft, target, some, steps=1, batch=4, learning_rate=1.0, seed=0, dtype=torch.float32
        )
        trainer.step = 1  # both losses
        trainer.accumulate(some)
        found.append(torch.cat([weight.grad.flatten() for weight in trainer.weights.values()]))
    assert found[0].abs().max() > 0
    assert torch.allclose(*found, atol=1e-6)


# The draft.


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_layers_of_a_family_are_the_target_again(kind: str, tmp_path: Path) -> None:
    target = model(kind)
    layers = (0, 1, 2)
    write_student(
        tmp_path, student_config(target.config, layers), student_weights(target, layers), None
    )
    draft = load_draft(str(tmp_path), target)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(draft(ids).logits, target(ids).logits)
    assert draft.get_input_embeddings() is target.get_input_embeddings()


def test_lists_of_layers_are_cut_with_them() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = student_config(model("olmo3", layer_types=kinds, sliding_window=8).config, (1, 2))
    assert config.layer_types == kinds[1:] and config.num_hidden_layers == 2


def test_layers_by_number_and_by_name() -> None:
    assert choose_layers(4, 30) == (0, 1, 28, 29)
    assert choose_layers(3, 30) == (0, 1, 29)
    assert choose_layers((0, 5), 6) == (0, 5)
    for wrong in (0, 6, (), (5, 0), (0, 0), (6,), (-1,)):
        with pytest.raises(ConfigError, match="layers: got"):
            choose_layers(wrong, 6)


def test_other_families_are_refused_by_name_before_any_work(tmp_path: Path) -> None:
    transformers.BloomConfig().save_pretrained(tmp_path / "target")  # and no weights
    with pytest.raises(UnsupportedError, match="'bloom', want one of gpt2"):
        distill(str(tmp_path / "target"), tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()


# What is sampled.


def writer(target: Any, template: str | None = TEMPLATE, **options: Any) -> Writer:
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template
    defaults = {"prompts": None, "seed": 3, "size": 4, "max_new_tokens": 8, "keep_hidden": False}
    stop_ids = frozenset([tiny_models.EOS])
    return Writer(target, tokenizer, stop_ids=stop_ids, **(defaults | options))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_texts_are_those_of_plain_decoding(kind: str) -> None:
    target = model(kind)
    prompts, temperatures = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6]], [1.0, 0.0, 0.7]
    found = complete(target, prompts, temperatures=temperatures, seeds=[1, 2, 3], max_new_tokens=12)
    config = EngineConfig(method="ar", impl="reference")
    params = [
        SamplingParams(12, temperature, seed=seed, ignore_eos=True)
        for seed, temperature in zip((1, 2, 3), temperatures, strict=True)
    ]
    with Engine(target, None, config) as engine:
        wanted = engine.generate(prompts, params)
    assert found == [its.token_ids for its in wanted]


def test_a_text_ends_with_its_stop_id() -> None:
    target = model("llama")
    ids, options = [[5, 6, 7]] * 4, {"temperatures": [1.0] * 4, "seeds": [1, 2, 3, 4]}
    free = complete(target, ids, max_new_tokens=12, **options)
    stop = free[0][3]
    for text, found in zip(
        free,
        complete(target, ids, max_new_tokens=12, stop_ids={stop}, **options),
        strict=True,
    ):
        cut = text.index(stop) + 1 if stop in text else len(text)
        assert found == text[:cut]


def test_a_chunk_depends_on_the_seed_and_its_number_alone() -> None:
    target = model("llama")
    first = writer(target, keep_hidden=True).chunk(2, lambda: None)
    again = writer(target, keep_hidden=True)
    again.chunk(1, lambda: None)
    for a, b in zip(first, again.chunk(2, lambda: None), strict=True):
        assert (
            a.prompt == b.prompt and torch.equal(a.ids, b.ids) and torch.equal(a.hidden, b.hidden)
        )
        assert len(a.hidden) == len(a.ids)
    others = writer(target, seed=4).chunk(2, lambda: None)
    assert [other.prompt for other in others] != [its.prompt for its in first]


def test_invented_questions_stand_after_the_template_and_are_varied() -> None:
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = TEMPLATE
    begun: list[str] = []

    def finish(ids: list[list[int]]) -> list[list[int]]:
        begun.extend(tokenizer.decode(row) for row in ids)
        return [tokenizer(" x ").input_ids for _ in ids]

    prompts = invent_prompts(tokenizer, range(40), 0, finish)
    assert len(set(prompts)) > 20
    for prompt, text in zip(prompts, begun, strict=True):
        assert prompt.chat == text.startswith("<user>")
        assert prompt.text.rstrip().endswith(" x")
    assert sum(prompt.chat for prompt in prompts) == 30
    tokenizer.chat_template = None
    assert not any(its.chat for its in invent_prompts(tokenizer, range(8), 0, finish))


def test_only_the_template_before_the_question_is_not_learned() -> None:
    for text in writer(model("llama")).chunk(1, lambda: None):
        assert text.start == (len("<user>") if text.prompt.chat else 1)


def test_prompts_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\none\n")
    (tmp_path / "b.json").write_text('["one", {"text": "def f", "kind": "code"}]')
    (tmp_path / "c.jsonl").write_text('"one"\n{"text": "two"}\n')
    one, two = Prompt("one", True), Prompt("two", True)
    assert read_prompts(str(tmp_path / "a.txt")) == [one, two]
    assert read_prompts(str(tmp_path / "b.json")) == [one, Prompt("def f", False)]
    assert read_prompts(str(tmp_path / "c.jsonl")) == [one, two]
    for name, content in (("d.json", "{"), ("e.json", "[{}, 3]"), ("f.txt", "alone\n")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=name):
            read_prompts(str(tmp_path / name))
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(str(tmp_path / "missing"))


def test_held_out_prompts_are_never_trained_on(tmp_path: Path, llama: str) -> None:
    prompts = [Prompt(f"question {number}", True) for number in range(20)]
    held_out, trained_on = split_prompts(prompts, seed=0)
    assert len(held_out) == 2 and sorted(p.text for p in held_out + trained_on) == sorted(
        p.text for p in prompts
    )
    target = load_model(llama, torch.float32)
    chunks = writer(target, prompts=(held_out, trained_on))
    assert {its.prompt for its in chunks.chunk(0, lambda: None)} == set(held_out)
    seen = [its.prompt for number in (1, 2, 3, 4, 5) for its in chunks.chunk(number, lambda: None)]
    assert set(seen) == set(trained_on)
    with pytest.raises(ConfigError, match=r"prompts: got one of \d+ tokens"):
        writer(target, prompts=(held_out, [Prompt("x" * 300, True)]))


# The command.


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_family_end_to_end(
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "measure", measure.measure)
    target, out = save(tmp_path / "target", kind), tmp_path / "draft"
    line = ["distill", "--target", target, "--out", str(out), "--layers", "0,2", "--texts", "4"]
    if kind != "llama":
        line += ["--draft-vocab", "200"]
    line += ["--max-new-tokens", "8", "--dtype", "float32", "--device", "cpu"]
    assert cli.main(line) == 0
    text = capsys.readouterr().out
    for part in (
        "temperature",
        "acceptance",
        "tokens per round, K = 4",
        "saguaro plan --verify-ms",
    ):
        assert part in text
    config = EngineConfig(method="sd", k=2, lane="inline", impl="reference")
    greedy = SamplingParams(12, ignore_eos=True)
    with Engine(target, str(out), config) as engine:
        found = engine.generate([[5, 6, 7]], greedy)[0].token_ids
        assert engine.stats()["drafted"] > 0 and engine.lane.off is None
    with Engine(target, None, EngineConfig(method="ar", impl="reference")) as engine:
        assert found == engine.generate([[5, 6, 7]], greedy)[0].token_ids
    assert not (out / ".distill").exists()
    assert ("logits for 200 ids" in text) == (kind != "llama")


def test_the_same_seed_gives_the_same_draft(llama: str, whole: Path, tmp_path: Path) -> None:
    distill(llama, tmp_path / "again", SETTINGS)
    assert weights(tmp_path / "again") == weights(whole)
    other = Settings(**{**SETTINGS.__dict__, "seed": 1, "texts": 1})
    distill(llama, tmp_path / "other", other)
    assert weights(tmp_path / "other") != weights(whole)


def interrupt(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, act: Callable[[], None]
) -> None:
    """Have `act` done in call `count` of a function of the distillation."""
    owner, attribute = {"advance": (Trainer, "advance"), "chunk": (Writer, "chunk")}[name]
    original, calls = getattr(owner, attribute), []

    def counted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            act()
        return original(*args)

    monkeypatch.setattr(owner, attribute, counted)


class Killed(BaseException):
    """Ends a run with no chance to save anything."""


def kill() -> None:
    raise Killed


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("name", "count", "act", "error"),
    [
        ("chunk", 1, kill, Killed),
        ("chunk", 3, kill, Killed),
        ("chunk", 2, ctrl_c, KeyboardInterrupt),
        ("advance", 6, kill, Killed),
        ("advance", 6, ctrl_c, KeyboardInterrupt),
    ],
)
def test_killed_and_resumed_it_ends_the_same(
    name: str,
    count: int,
    act: Callable[[], None],
    error: type[BaseException],
    llama: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_CHECKPOINT_S", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt(patch, name, count, act)
        with pytest.raises(error):
            distill(llama, tmp_path / "out", SETTINGS)
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "out" / "config.json").exists()  # not yet a draft
    steps = []
    monkeypatch.setattr(
        Trainer, "advance", lambda self, its=Trainer.advance: steps.append(1) or its(self)
    )
    distill(llama, tmp_path / "out", SETTINGS, resume=True)
    assert weights(tmp_path / "out") == weights(whole)
    done = {("advance", kill): 5, ("advance", ctrl_c): 6}.get((name, act), 0)
    assert len(steps) == 16 - done


def test_a_second_ctrl_c_does_not_wait(llama: str, tmp_path: Path) -> None:
    def twice() -> None:
        ctrl_c()
        ctrl_c()
        pytest.fail("the second one was ignored")

    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, "advance", 1, twice)
        make_small(patch)
        with pytest.raises(KeyboardInterrupt):
            distill(llama, tmp_path / "out", SETTINGS)


def test_minutes_are_turned_into_a_fixed_amount_of_work(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(**{**SETTINGS.__dict__, "texts": None, "minutes": 0.02})
    with monkeypatch.context() as patch:
        interrupt(patch, "chunk", 2, kill)
        with pytest.raises(Killed):
            distill(llama, tmp_path, settings)
    planned = run.read_json(Work(tmp_path).plan)
    assert planned["chunks"] >= 1 and planned["chunk_s"] > 0 and planned["step_s"] > 0
    run.write_json(Work(tmp_path).plan, planned | {"chunks": 1})
    report = distill(llama, tmp_path, settings, resume=True)
    assert report["plan"] == planned | {"chunks": 1}
    # Done: nothing is left to do, and the report is that of before.
    assert distill(llama, tmp_path, settings, resume=True) == report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_says_what_is_done_and_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        with Progress(120.0, done_s=30.0) as progress:
            progress.show("sampling", 40.0, ", 1/3")
            progress.show("training", 60.0, ", step 1/9")

    work()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("sampling, 1/3, about 1.3 min left")
    assert lines[1].startswith("training, step 1/9, about 1.0 min left")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    work()
    shown = terminal.getvalue().rstrip().split("\r")[-1]
    assert re.fullmatch(r"training: +50%\|.*\| \d\d:\d\d, .* left, step 1/9", shown)


def test_what_is_there_is_not_overwritten(
    llama: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        distill(llama, whole, SETTINGS)
    with pytest.raises(ConfigError, match="layers: got 1, but .* was begun with 2"):
        distill(llama, whole, Settings(**{**SETTINGS.__dict__, "layers": 1}), resume=True)
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(ConfigError, match="not an empty folder"):
        distill(llama, tmp_path, SETTINGS)
    # The command line needs no options to resume, and refuses other ones.
    line = ["distill", "--target", llama, "--out", str(whole), "--resume"]
    assert cli.main(line) == 0
    assert "tokens per round" in capsys.readouterr().out
    assert cli.main([*line, "--seed", "9"]) == 1
    assert "seed: got 9" in capsys.readouterr().err


def test_the_ids_of_a_smaller_vocabulary_are_the_frequent_ones() -> None:
    prompt = Prompt("", True)
    texts = [
        Text(prompt, torch.tensor([9, 9, 9, 9, 5, 5, 7]), 4, None),
        Text(prompt, torch.tensor([7, 5, 3]), 1, None),
    ]
    # 5 thrice, 3 and 7 once; the nines are a template's. Then the lowest ids.
    found = [frequent_ids(texts, n, 12, always=(11,)).tolist() for n in (1, 2, 4, 6)]
    assert found == [[11], [5, 11], [3, 5, 7, 11], [0, 1, 3, 5, 7, 11]]


def test_a_smaller_vocabulary_is_resumed_with_the_same_ids(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(**{**SETTINGS.__dict__, "draft_vocab": 100, "texts": 4})
    distill(llama, tmp_path / "whole", settings)
    monkeypatch.setattr(run, "_CHECKPOINT_S", 0.0)
    with monkeypatch.context() as patch:
        interrupt(patch, "advance", 5, kill)
        with pytest.raises(Killed):
            distill(llama, tmp_path / "out", settings)
    distill(llama, tmp_path / "out", settings, resume=True)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert len(stored[DRAFT_VOCAB]) == 100 and tiny_models.EOS in stored[DRAFT_VOCAB]
    with pytest.raises(ConfigError, match="draft_vocab: got 259, want fewer than"):
        distill(llama, tmp_path / "all", Settings(layers=2, draft_vocab=259))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_draft_is_trained_further(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, first = save(tmp_path / kind, kind), tmp_path / "first"
    distill(target, first, Settings(**{**SETTINGS.__dict__, "draft_vocab": 100, "layers": (0, 2)}))
    before = load_file(first / "model.safetensors")
    settings = Settings(**{**SETTINGS.__dict__, "draft": str(first), "layers": 4, "seed": 5})
    begun: list[dict[str, torch.Tensor]] = []
    with monkeypatch.context() as patch:
        patch.setattr(run, "_CHECKPOINT_S", 0.0)
        note = lambda self, its=Trainer.advance: (  # noqa: E731
            begun or begun.append({n: w.detach().clone() for n, w in self.weights.items()}),
            its(self),
        )[1]
        patch.setattr(Trainer, "advance", note)
        interrupt(patch, "advance", 6, kill)
        with pytest.raises(Killed):
            distill(target, tmp_path / "out", settings)
    for name, tensor in begun[0].items():
        assert torch.equal(tensor, before[name].float()), name
    distill(target, tmp_path / "out", settings, resume=True)
    distill(target, tmp_path / "whole", settings)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after[DRAFT_VOCAB], before[DRAFT_VOCAB])
    assert after.keys() == before.keys()
    assert not any(torch.equal(after[n], before[n]) for n in after if n != DRAFT_VOCAB)
    config = EngineConfig(method="sd", lane="inline", impl="reference")
    with Engine(target, str(tmp_path / "out"), config) as engine:
        engine.generate([[5, 6, 7]], SamplingParams(4, ignore_eos=True))
        assert engine.stats()["drafted"] > 0


def test_a_draft_that_does_not_fit_is_refused_before_any_work(
    llama: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save(tmp_path / "qwen3", "qwen3")
    for target, draft, wanted in (
        (other, str(whole), "model_type is llama, the target's is qwen3"),
        (llama, llama, "has an embedding of its own"),
        (llama, str(tmp_path), "has no config.json"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            distill(target, tmp_path / "out", Settings(draft=draft))
    wide = model("llama", hidden_size=32)
    with pytest.raises(ConfigError, match="hidden_size is 16, the target's is 32"):
        check_draft(str(whole), wide.config)
    assert not (tmp_path / "out").exists()
    line = ["distill", "--target", llama, "--out", str(tmp_path / "out"), "--draft", str(whole)]
    for option, value in (("layers", "2"), ("draft-vocab", "9")):
        assert cli.main([*line, f"--{option}", value]) == 1
        assert f"{option.replace('-', '_')}: got {value} and draft" in capsys.readouterr().err


def test_settings_are_checked() -> None:
    for wrong in (
        {"minutes": 0}, {"texts": -1}, {"dtype": "int8"}, {"device": "abacus"}, {"texts": 1.5},
        {"minutes": float("inf")}, {"minutes": None}, {"max_new_tokens": None}, {"seed": "x"},
        {"draft_vocab": 0}, {"learning_rate": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: got"):
            Settings(**wrong)


def test_a_stored_chunk_is_read_as_it_was_written(llama: str, tmp_path: Path) -> None:
    written = writer(load_model(llama, torch.float32), keep_hidden=True).chunk(1, lambda: None)
    save_chunk(tmp_path / "chunk.safetensors", written)
    for a, b in zip(written, load_chunk(tmp_path / "chunk.safetensors"), strict=True):
        assert a.prompt == b.prompt and a.start == b.start
        assert torch.equal(a.ids, b.ids) and torch.equal(a.hidden, b.hidden)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys, saguaro_runtime.cli as c\n"
        "try: c.main(['distill', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = Path(run.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "--draft ./draft" in done.stdout


def test_one_run_at_a_time_is_at_work_in_a_folder(llama: str, tmp_path: Path) -> None:
    with (
        Work(tmp_path).begun(llama, SETTINGS, resume=False),
        pytest.raises(ConfigError, match="another run is at work"),
    ):
        distill(llama, tmp_path, SETTINGS, resume=True)
    # One that ended before it wrote anything has begun nothing.
    (tmp_path / ".distill" / "settings.json").unlink()
    with Work(tmp_path).begun(llama, SETTINGS, resume=False):
        assert Work(tmp_path).stored()["target"] == llama


def test_a_full_disk_and_damaged_files_lose_nothing(
    llama: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of file in turn cannot be written; what a power cut left in part is made again."""
    monkeypatch.setattr(run, "_CHECKPOINT_S", 0.0)
    out = tmp_path / "out"
    for owner, name, error in (
        (Path, "write_text", OSError(28, "No space left on device")),
        (texts, "save_file", SafetensorError("No space left on device")),
        (student, "save_file", SafetensorError("No space left on device")),
        (torch, "save", RuntimeError("[enforce fail at inline_container.cc:672]")),
    ):

        def full(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(SaguaroError, match="cannot be written .+ --resume"):
                distill(llama, out, SETTINGS, resume=True)
        assert not list(tmp_path.rglob("*.part"))
    with monkeypatch.context() as patch:
        interrupt(patch, "advance", 6, kill)
        with pytest.raises(Killed):
            distill(llama, out, SETTINGS, resume=True)
    for name in ("checkpoint.pt", "chunk-00001.safetensors"):
        file = out / ".distill" / name
        file.write_bytes(file.read_bytes()[:-50])
    distill(llama, out, SETTINGS, resume=True)
    assert weights(out) == weights(whole)
    assert not (out / ".distill").exists()


def test_what_cannot_be_done_is_refused_before_any_work(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "out"
    for wrong in ({"max_new_tokens": 100_000}, {"device": "cuda"}, {"layers": 99}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            distill(llama, out, replace(SETTINGS, **wrong))
    assert not out.exists()
