"""Tiny transformers models and a tokenizer of bytes, made here: nothing is fetched."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

VOCAB = 259
"""256 bytes and <pad>, <eos>, <bos>."""
PAD, EOS, BOS = 256, 257, 258


def llama(
    seed: int = 0,
    *,
    near: transformers.PreTrainedModel | None = None,
    scale: float = 4.0,
    length: int = 256,
) -> transformers.PreTrainedModel:
    """A random model; `near`: like that one, so that a part of its drafts is accepted."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.lm_head.weight.data.mul_(scale)
    if near is not None:
        for mine, its in zip(model.parameters(), near.parameters(), strict=True):
            mine.data.mul_(0.25).add_(its.data)
    for its in (model.generation_config, model.config):
        its.bos_token_id, its.eos_token_id, its.pad_token_id = None, None, PAD
    return model


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One id per byte, and the three special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = bytes_to_unicode()
    core = Tokenizer(models.BPE({symbols[byte]: byte for byte in range(256)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(its) for its in ("<pad>", "<eos>", "<bos>")])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save(folder: Path, model: transformers.PreTrainedModel) -> str:
    """The model and the tokenizer as a transformers folder."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
