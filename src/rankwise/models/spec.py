"""MODEL specifications, the text that names a network, taken apart; nothing is built here.

    resnet20                           one of our own (see `zoo.NETWORKS`)
    torchvision:resnet18               any torchvision architecture, with random weights
    torchvision:resnet18?weights=DEFAULT   with trained weights, which torchvision downloads
    timm:vit_tiny_patch16_224          any timm architecture, with random weights
    timm:vit_tiny_patch16_224?pretrained   with trained weights, which timm downloads
    hf:FOLDER, hf:OWNER/NAME           a network of transformers with its weights, from a folder or from the hub
    file.py:factory                    whatever `factory()` in that file returns
    out/                               a folder that `rankwise compress`, `train` or `retrain` wrote

Arguments of the constructor follow a question mark, joined with &: `timm:test_vit?num_classes=10&in_chans=1`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rankwise.errors import RankwiseError
from rankwise.models.zoo import NETWORKS


@dataclass(frozen=True)
class Spec:
    """A MODEL specification taken apart; `kind` is own, torchvision, timm, hf, file or folder."""

    text: str
    kind: str
    name: str
    options: dict[str, Any]


def parse(text: str) -> Spec:
    """
    >>> parse("torchvision:resnet18?num_classes=10").options
    {'num_classes': 10}
    """
    head, _, query = text.partition("?")
    prefix, _, rest = head.partition(":")
    if head in NETWORKS:
        return Spec(text, "own", head, _options(text, query))
    if prefix in ("torchvision", "timm", "hf") and rest:
        return Spec(text, prefix, rest, _options(text, query))
    if ".py:" in head or head.endswith(".py"):
        return Spec(text, "file", head, _options(text, query))
    if text and os.path.isdir(text):  # False, too, for a name that no folder can have
        return Spec(text, "folder", text, {})
    raise RankwiseError(
        f"unknown network {text!r}: {near(head, NETWORKS)}; or give torchvision:NAME, timm:NAME, "
        "hf:FOLDER, file.py:factory, or a folder that `rankwise compress` wrote, or `train`"
    )


def near(name: str, names: Iterable[str]) -> str:
    """What there is instead: all names where they are few, otherwise those that begin alike or look alike.

    >>> near("resnet", ["resnet20", "digits-cnn"])
    'there are digits-cnn, resnet20'
    """
    known = sorted(names)
    close = [other for other in known if other.startswith(name)][:5] or get_close_matches(name, known, n=5)
    if 0 < len(known) <= 12:
        return f"there are {', '.join(known)}"
    return f"did you mean {', '.join(close)}?" if close else f"none of its {len(known)} names is close to it"


def _options(text: str, query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in query.split("&") if query else ():
        key, equals, value = pair.partition("=")
        if not key.isidentifier() or not (equals or key == "pretrained"):
            raise RankwiseError(f"{pair!r} in {text!r} is no argument: give key=value pairs joined with &")
        options[key] = _value(value) if equals else True
    return options


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
