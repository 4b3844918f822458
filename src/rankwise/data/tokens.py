"""How a network takes text: its own tokenizer, and whether it reads windows, sentences, or text and its continuation.

A network knows where it was opened (`config.name_or_path`); its tokenizer lies there too. No code of that place is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from rankwise.errors import RankwiseError, need

CAUSAL, ENCODER, PAIRS = "causal", "encoder", "encoder-decoder"
LENGTH = 256  # tokens of a window or a sentence, unless the network takes fewer


@dataclass(frozen=True, eq=False)
class Reader:
    """What makes tokens of text for one network: its tokenizer, its role, and how many tokens it takes at most.

    `start` is the token that a decoder begins with, for networks that read text and then write.
    """

    tokenizer: Any
    role: str
    most: int | None
    start: int = 0

    def length(self, asked: int | None) -> int:
        """Tokens of an input: what was asked for, if the network takes that many."""
        if asked is None:
            return min(LENGTH, self.most or LENGTH)
        if asked < 2 or (self.most is not None and asked > self.most):
            most = "" if self.most is None else f" to {self.most}, which is the most that the network takes"
            raise RankwiseError(f"a length of {asked} tokens was given: give a number from 2{most}")
        return asked

    def tokens(self, text: str, special: bool = False) -> list[int]:
        """Numbers of the tokens; `special` adds what the network wants around a sentence."""
        found: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return found

    @property
    def first(self) -> list[int]:
        """What the tokenizer itself puts at the beginning of a text: one token or nothing."""
        plain, whole = self.tokens("a"), self.tokens("a", special=True)
        begins = self.tokenizer.bos_token_id
        return [begins] if begins is not None and whole[:1] == [begins] != plain[:1] else []

    @property
    def between(self) -> list[int]:
        """What stands between two documents: the token that ends a text, if there is one."""
        ends = self.tokenizer.eos_token_id
        return [] if ends is None else [ends]


def takes_text(model: nn.Module) -> bool:
    """Whether a network is one of transformers that reads tokens."""
    return getattr(model, "main_input_name", "") == "input_ids" and hasattr(model, "config")


def text_config(model: nn.Module) -> Any:
    """The part of a network's configuration that is about text."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def role_of(model: nn.Module) -> str:
    """A network of its kind reads windows and predicts the next token, reads sentences, or reads and then writes."""
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        return PAIRS
    if getattr(model, "can_generate", lambda: False)() or getattr(config, "is_decoder", False):
        return CAUSAL
    names = need("transformers.models.auto.modeling_auto", extra="hf", purpose="a Hugging Face network")
    kind = text_config(model).model_type
    predicts, fills_in = (kind in getattr(names, f"MODEL_FOR_{what}_LM_MAPPING_NAMES") for what in ("CAUSAL", "MASKED"))
    return CAUSAL if predicts and not fills_in else ENCODER


def most_tokens(model: nn.Module) -> int | None:
    """How many tokens a network takes at most; None where its positions are relative."""
    config = text_config(model)
    most = getattr(config, "max_position_embeddings", None)
    if most is None or config.model_type in ("t5", "mt5", "umt5"):
        return None
    # RoBERTa and its kin count positions from behind the number of the padding token.
    shifted = config.model_type in ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "data2vec-text")
    return int(most) - (int(config.pad_token_id or 0) + 1 if shifted else 0)


def reader_of(model: nn.Module) -> Reader:
    """The tokenizer that lies beside a network's weights."""
    place = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    if not takes_text(model) or not place:
        raise RankwiseError(
            f"text is tokenised by the network's own tokenizer, and {type(model).__name__} comes with none: give "
            "hf:FOLDER, or from Python batches of tokens (data=[{'input_ids': …}, …])"
        )
    auto = need("transformers", extra="hf", purpose="a tokenizer").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(place, trust_remote_code=False)
    except Exception as err:  # transformers raises nearly anything here
        why = (str(err).strip().splitlines() or [type(err).__name__])[0]
        raise RankwiseError(
            f"the tokenizer of {place} could not be opened ({why}): put its tokenizer.json and tokenizer_config.json "
            "beside the weights"
        ) from err
    config: Any = model.config
    start = getattr(config, "decoder_start_token_id", None)
    start = getattr(config, "pad_token_id", None) if start is None else start
    return Reader(tokenizer, role_of(model), most_tokens(model), int(start or 0))
