"""Networks of transformers: `hf:FOLDER` or `hf:OWNER/NAME`. No code of a folder or of the hub is ever run.

The class is the one that config.json names under "architectures", if transformers has it; otherwise AutoModel.
`?class=AutoModelForCausalLM` names another one, `?dtype=bfloat16` another precision than that of the files,
`?revision=…` a version on the hub. A weight that the files lack would be random: that is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rankwise.data.hub import hub_or_cache
from rankwise.data.tokens import PAIRS, most_tokens, role_of, takes_text, text_config
from rankwise.errors import RankwiseError, need
from rankwise.models.spec import Spec
from rankwise.surgery.pretrained_folder import METHOD

OPTIONS = ("class", "dtype", "revision", "add_pooling_layer")
LENGTH = 64  # tokens of an example, unless a length is given
DTYPES = {"auto": "auto", "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def open_network(spec: Spec) -> nn.Module:
    """The network of `hf:PLACE`, with its weights, in eval mode."""
    options = dict(spec.options)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise RankwiseError(f"{spec.text!r} asks for {unknown[0]}: possible are {', '.join(OPTIONS)}")
    dtype = options.pop("dtype", "auto")
    if dtype not in DTYPES:
        raise RankwiseError(f"{spec.text!r} asks for dtype={dtype}: possible are {', '.join(DTYPES)}")
    named = options.pop("class", None)
    with _one_sentence(spec), quiet(), hub_or_cache():
        cls = class_of(spec, named, config_of(spec, options))
        loaded = cls.from_pretrained(
            spec.name, dtype=DTYPES[dtype], trust_remote_code=False, output_loading_info=True, **options
        )
    network, info = loaded
    _check_complete(spec, network, info)
    return cast(nn.Module, network.eval())


def config_of(spec: Spec, options: dict[str, Any]) -> Any:
    library = need("transformers", extra="hf", purpose="a Hugging Face network")
    place = Path(spec.name)
    if os.path.exists(place) and not os.path.isfile(place / "config.json"):
        raise RankwiseError(f"{spec.name} has no config.json: give a folder that save_pretrained wrote")
    revision = {key: options[key] for key in ("revision",) if key in options}
    config = library.AutoConfig.from_pretrained(spec.name, trust_remote_code=False, **revision)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") == METHOD:
        import_module("rankwise.hf")  # teaches transformers to open such a folder
    return config


def class_of(spec: Spec, named: object, config: Any) -> Any:
    """What `?class=` names, or config.json, or AutoModel. Only classes of transformers itself."""
    library = need("transformers", extra="hf", purpose="a Hugging Face network")
    architectures = getattr(config, "architectures", None) or []
    names = [named] if named is not None else [*architectures[:1], "AutoModel"]
    for name in names:
        found = getattr(library, str(name), None)
        if isinstance(found, type) and hasattr(found, "from_pretrained") and str(name)[:1].isupper():
            return found
    raise RankwiseError(
        f"{spec.text!r} asks for class={named}, which transformers does not have: give a name such as "
        "AutoModelForCausalLM"
    )


def _check_complete(spec: Spec, network: Any, info: dict[str, Any]) -> None:
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        pooler = all("pooler" in key for key in missing)
        advice = "add ?add_pooling_layer=false" if pooler else "get the rest of the files, or name another ?class="
        raise RankwiseError(
            f"{spec.name} has no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f" of {type(network).__name__}, which would be random: {advice}"
        )


@contextmanager
def _one_sentence(spec: Spec) -> Iterator[None]:
    try:
        yield
    except RankwiseError:
        raise
    except Exception as err:  # transformers, the hub, safetensors and requests have no error in common
        why = " ".join((str(err).strip().splitlines() or [""])[:2])
        if os.path.exists(spec.name):
            advice = "check the folder"
        elif spec.name.startswith((".", "/")) or spec.name.count("/") > 1:
            advice = "there is no such folder"
        else:
            advice = "there is no such folder here, and from the hub it needs a connection to the internet"
        raise RankwiseError(f"{spec.text!r} could not be opened ({type(err).__name__}: {why}): {advice}") from err


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and reports of transformers: what matters is an exception, or what is missing."""
    logging = need("transformers.utils.logging", extra="hf", purpose="a Hugging Face network")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def is_huggingface(network: nn.Module) -> bool:
    """Whether a network is one of transformers."""
    return hasattr(network, "config") and isinstance(getattr(network, "main_input_name", None), str)


def example_of(network: nn.Module, length: int | None = None) -> dict[str, Tensor] | None:
    """A seeded example for a network of transformers: tokens, pixels or both; None where that is not known.

    `length` is that of a text; an encoder-decoder reads half of it and writes the other half.
    """
    random = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    config: Any = network.config
    if takes_text(network):
        most = most_tokens(network)
        count = min(LENGTH, most or LENGTH) if length is None else length
        if count < 2 or (most is not None and count > most):
            raise RankwiseError(f"--input {count} was given: give a number of tokens from 2 to {most}")
        vocabulary = int(text_config(network).vocab_size)
        reads = count // 2 if role_of(network) == PAIRS else count
        found["input_ids"] = torch.randint(vocabulary, (1, reads), generator=random)
        if role_of(network) == PAIRS:
            found["decoder_input_ids"] = torch.randint(vocabulary, (1, count - reads), generator=random)
    seen = getattr(config, "vision_config", None) or config
    if hasattr(seen, "image_size") and (found == {} or seen is not config):
        side = seen.image_size if isinstance(seen.image_size, int) else seen.image_size[0]
        dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
        shape = (1, getattr(seen, "num_channels", 3), side, side)
        found["pixel_values"] = torch.randn(shape, generator=random).to(dtype)
    return found or None
