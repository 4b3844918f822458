"""Tiny random networks of transformers with a tokenizer, in folders as save_pretrained writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise  # noqa: F401  (before transformers: its hook makes torchvision importable)

transformers = pytest.importorskip("transformers")
WORDS = ("the", "a", "cat", "dog", "tree", "sun", "ran", "sat", "saw", "red", "big", "and", "on", "in", "with", "of")
WORDS += ("to", ".", "once", "upon", "time", "little", "bird", "sang")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "</s>")
VOCABULARY = 64
SENTENCE = "the little cat saw a big red bird and the dog ran to the tree . "


def tokenizer(sentence: bool = False) -> Any:
    """Words of a small vocabulary; with `sentence` it puts [CLS] and [SEP] around a text, as BERT's does."""
    tokenizers = pytest.importorskip("tokenizers")
    numbers = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if sentence:
        around = [("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])]
        made.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def llama(**changes: Any) -> Any:
    """Four heads that share two keys and values, tied embeddings."""
    given = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**{**given, **heads, "tie_word_embeddings": True, "eos_token_id": 4, **changes})
    return seeded(transformers.LlamaForCausalLM, config)


def bert(**changes: Any) -> Any:
    given = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    return seeded(transformers.BertModel, transformers.BertConfig(**{**given, **heads, **changes}))


def seeded(make: Any, config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(config).eval()


def folder(path: Path, network: Any, sentence: bool = False, **how: Any) -> Path:
    """What save_pretrained writes, and a tokenizer beside it."""
    network.save_pretrained(path, **how)
    tokenizer(sentence).save_pretrained(path)
    return path
