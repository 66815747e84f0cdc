"""A GGUF Llama as a transformers folder: bfloat16 weights, config, tokenizer.

Written out here instead of transformers' `from_pretrained(gguf_file=...)`: transformers 5.17 builds
this tokenizer with a wrong decoder and a wrong end-of-text token, and reading the file once for the
weights and once more for the tokenizer takes half a minute.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from saguaro_kernels.errors import ConfigError, UnsupportedError

from .cache import default_cache, locked, make_once, sha256_of

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL = 3  # the token type of <|im_start|> and the like


def folder_of(path: str) -> str:
    """`path` itself, or the transformers folder made from the GGUF file that it names.

    A file is converted once and kept in the cache under its SHA-256.

    Raises:
        ConfigError: there is no such file, or the package `gguf`, which reads it, is missing.
        UnsupportedError: it does not hold a Llama with a byte-level BPE tokenizer.
    """
    file = Path(path).expanduser()
    if file.suffix != ".gguf":
        return path
    if not file.is_file():
        raise ConfigError(f"model {path!r}: there is no such file")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model {path!r}: the package 'gguf', which reads it, is missing; "
            'run: pip install "saguaro-ssd[demo]"'
        )
    cache = default_cache()
    folder = cache / f"gguf-{sha256_of(file)[:12]}"
    from .loading import explained

    with locked(cache), explained(f"model {path!r}", "want a GGUF file of a Llama"):
        make_once(folder, lambda into: convert(file, into))
    return str(folder)


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of `gguf_file` into `folder`, which exists.

    Raises:
        UnsupportedError: the file does not hold a Llama with a byte-level BPE tokenizer.
    """
    import gguf
    from safetensors.torch import save_file
    from tqdm import tqdm

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"], fields["tokenizer.ggml.model"]
    if kind != ("llama", "gpt2"):
        raise UnsupportedError(f"{gguf_file.name}: got {kind}, want ('llama', 'gpt2')")
    config = _config(fields)
    weights = {}
    for tensor in tqdm(reader.tensors, desc="converting", unit="tensor", disable=None):
        dense = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        name, heads = _place(tensor.name, config)
        weights[name] = (_unpermute(dense, heads) if heads else dense).bfloat16()
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _tokenizer(fields).save_pretrained(folder)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        **{f"{key}_token_id": fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos")},
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _place(name: str, config: dict[str, Any]) -> tuple[str, int]:
    """The transformers name of a tensor, and its rotary heads if its rows are permuted, else 0."""
    if not name.startswith("blk."):
        stem, kind = name.rsplit(".", 1)
        return f"{_OUTSIDE[stem]}.{kind}", 0
    _, layer, part, kind = name.split(".")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}", heads.get(part, 0)


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs (2i, 2i + 1) within a head, as llama.cpp has them, to (i, i + half)."""
    size, width = rows.shape
    return rows.view(heads, size // heads // 2, 2, width).transpose(1, 2).reshape(size, width)


def _tokenizer(fields: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)  # what llama.cpp calls "smollm"
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    bpe.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL]
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {
        f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]]
        for theirs, ours in names.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **special,
    )
