"""Trained weights to download: `torchvision:NAME?weights=DEFAULT`, `timm:NAME?pretrained`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from rankwise.data.hub import hub_or_cache
from rankwise.errors import RankwiseError
from rankwise.models.spec import Spec, near

KEYS = {"torchvision": "weights", "timm": "pretrained"}


def wants_weights(spec: Spec) -> bool:
    """Whether a specification asks for trained weights."""
    return bool(spec.options.get(KEYS.get(spec.kind, ""), False))


def without_weights(spec: Spec) -> Spec:
    """The same architecture. A folder has weights already, so nothing is downloaded for it.

    >>> from rankwise.models.spec import parse
    >>> without_weights(parse("timm:test_vit?pretrained&num_classes=10")).text
    'timm:test_vit?num_classes=10'
    """
    key = KEYS.get(spec.kind, "")
    if key not in spec.options:
        return spec
    head, _, query = spec.text.partition("?")
    rest = "&".join(pair for pair in query.split("&") if pair.partition("=")[0] != key)
    options = {name: value for name, value in spec.options.items() if name != key}
    return replace(spec, text=f"{head}?{rest}" if rest else head, options=options)


def check_weights_name(spec: Spec, weights: Any) -> None:
    """`weights` is torchvision's enumeration of what it has for a network."""
    asked, known = spec.options["weights"], list(weights.__members__)
    if asked not in known:
        names = near(str(asked), known) if known else "torchvision has none for this network"
        raise RankwiseError(f"{spec.text!r} asks for weights={asked}: {names}")


def check_timm_weights(spec: Spec, names: list[str]) -> None:
    if spec.options["pretrained"] is not True:
        raise RankwiseError(f"{spec.text!r} is not understood: write {without_weights(spec).text}?pretrained")
    if not any(name.partition(".")[0] == spec.name.partition(".")[0] for name in names):
        raise RankwiseError(f"timm has no trained weights for {spec.name!r}: leave ?pretrained out, and give --weights")


@contextmanager
def downloading(spec: Spec) -> Iterator[None]:
    """One sentence where weights cannot be had; what is downloaded is read as tensors only, nothing in it runs."""
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        yield
    except RankwiseError:
        raise
    except Exception as err:  # urllib, requests and the hub have no error in common
        why = (str(err).strip().splitlines() or [""])[0]
        raise RankwiseError(
            f"the weights of {spec.text!r} could not be loaded ({type(err).__name__}: {why}): check the connection to "
            f"the internet, or get the file elsewhere and give {without_weights(spec).text} with --weights FILE"
        ) from err
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


def is_random(spec: Spec) -> bool:
    """Whether `build` draws the weights. A factory in a file may load its own; folders have some."""
    return spec.kind not in ("file", "folder", "hf") and not wants_weights(spec)


def download(make: Any, spec: Spec, options: dict[str, Any]) -> nn.Module:
    with downloading(spec), hub_or_cache():
        model: nn.Module = make(**options)
        return model
