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


def gpt2() -> Any:
    """Conv1D in place of Linear, tied embeddings."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    return seeded(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes, bos_token_id=4, eos_token_id=4))


def t5() -> Any:
    """Reads and then writes; one embedding for both."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=4, pad_token_id=0)
    return seeded(transformers.T5ForConditionalGeneration, config)


def vit() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5)
    return seeded(transformers.ViTForImageClassification, config)


def clip() -> Any:
    """Two towers, one for text and one for images."""
    each = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**each, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 4}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**each, "image_size": 16, "patch_size": 4}, projection_dim=32
    )
    return seeded(transformers.CLIPModel, config)


def mixtral() -> Any:
    """Experts of a layer in one tensor of three axes."""
    given = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.MixtralConfig(**given, **heads, num_local_experts=4, num_experts_per_tok=2)
    return seeded(transformers.MixtralForCausalLM, config)


def qwen_moe() -> Any:
    given = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48, "num_experts": 4}
    config = transformers.Qwen2MoeConfig(**given, **heads, **experts, num_experts_per_tok=2)
    return seeded(transformers.Qwen2MoeForCausalLM, config)


FAMILIES = {one.__name__: one for one in (llama, gpt2, t5, bert, vit, clip, mixtral, qwen_moe)}
