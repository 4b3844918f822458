"""What makes a folder one that transformers opens: config.json with the plan in it, tokenizer, README.

`quantization_config` of config.json says {"quant_method": "rankwise", "plan": …}, and `import rankwise.hf` teaches
transformers what that means. Without that import transformers would warn of an unknown method, skip it, and fill the
layers that it does not find with random numbers. So config.json also has two entries that transformers cannot follow,
and says so with an error that quotes them: `transformers_weights`, and `fusion_config`, which stays where
`save_pretrained` writes the folder again.
"""

from __future__ import annotations

import copy
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.core import files
from rankwise.errors import need
from rankwise.planning.plan import Plan
from rankwise.version import __version__

METHOD = "rankwise"
CONFIG, GENERATION, README = "config.json", "generation_config.json", "README.md"
NEEDED = "a network compressed by rankwise (pip install rankwise, then `import rankwise.hf` before from_pretrained)"
# Files beside the weights that belong to the network whatever its weights are.
BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json", "modules.json", "sentence_bert_config.json"),
    *("config_sentence_transformers.json", "1_Pooling/config.json"),
)


def is_pretrained(model: nn.Module) -> bool:
    """Whether a network is one of transformers, with a configuration that can be written."""
    return hasattr(getattr(model, "config", None), "to_diff_dict") and hasattr(model, "save_pretrained")


def quantization(plan: Plan) -> dict[str, Any]:
    """`quantization_config`: the method, the version that wrote it, and the plan."""
    return {"quant_method": METHOD, "version": __version__, "plan": plan.to_json()}


def plan_in(folder: Path) -> Plan | None:
    """The plan in a folder's config.json, or None where there is none."""
    path = folder / CONFIG
    if not os.path.isfile(path):  # False, too, for a name that no file can have
        return None
    found = files.parse(files.read(path), str(path)).get("quantization_config")
    if not isinstance(found, dict) or found.get("quant_method") != METHOD:
        return None
    return read_plan_of(found, str(path))


def read_plan_of(entry: dict[str, Any], where: str) -> Plan:
    """The plan in a `quantization_config`."""
    return Plan.loads(json.dumps(files.field(entry, "plan", dict, f"quantization_config of {where}")), where)


def files_for(model: nn.Module, plan: Plan) -> dict[str, bytes]:
    """Names and contents of all files but the weights and the plan."""
    network: Any = model
    found = {CONFIG: _config(network, plan)}
    if getattr(network, "generation_config", None) is not None and network.can_generate():
        found[GENERATION] = network.generation_config.to_json_string(use_diff=True).encode()
    found |= _beside(str(network.config.name_or_path or ""))
    return {**found, README: _readme(network, plan).encode()}


def forget_plan_(model: nn.Module) -> None:
    """A network that is dense again follows no plan: `save_pretrained` writes it as it wrote the original."""
    network: Any = model
    config = getattr(network, "config", None)
    if getattr(getattr(config, "quantization_config", None), "quant_method", None) != METHOD:
        return
    for owner, names in (
        (config, ("quantization_config", "fusion_config", "_is_quantized")),
        (network, ("hf_quantizer", "_tied_weights_keys")),
    ):
        for name in names:
            if name in vars(owner):
                delattr(owner, name)
    if hasattr(network, "all_tied_weights_keys"):
        network.all_tied_weights_keys = network.get_expanded_tied_weights_keys(all_submodels=True)


def _config(network: Any, plan: Plan) -> bytes:
    config = copy.deepcopy(network.config)
    config.architectures = [type(network).__name__]
    config.dtype = network.dtype
    written = {
        **config.to_diff_dict(),
        "quantization_config": quantization(plan),
        "transformers_weights": NEEDED,
        "fusion_config": {NEEDED: True},
    }
    return (json.dumps(written, indent=2, sort_keys=True) + "\n").encode()


def _beside(place: str) -> dict[str, bytes]:
    """Tokenizer and the like, as they lie beside the original: in a folder, or in the cache of the hub."""
    if not place:
        return {}
    folder = Path(place)
    if folder.is_dir():
        return {name: files.read(folder / name) for name in BESIDE if (folder / name).is_file()}
    found = _cached(place)
    if not any("token" in name or "processor" in name for name in found):
        library = need("transformers", extra="hf", purpose="a Hugging Face network")
        with suppress(Exception):  # one that has no tokenizer, or no connection: then there is none in the folder
            library.AutoTokenizer.from_pretrained(place, trust_remote_code=False)  # puts its files into the cache
            found = _cached(place)
    return found


def _cached(place: str) -> dict[str, bytes]:
    """What the cache of the hub has of a network, but for its weights."""
    hub = need("transformers.utils", extra="hf", purpose="a Hugging Face network")
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = {}
    for name in BESIDE:
        path = hub.cached_file(place, name, local_files_only=True, **quietly)
        if path is not None:
            found[name] = files.read(Path(path))
    return found


def _readme(network: Any, plan: Plan) -> str:
    """What this folder is, how to open it, and the plan in words."""
    name = type(network).__name__
    auto = "AutoModelForCausalLM" if name.endswith(("ForCausalLM", "LMHeadModel")) else name
    base = plan.model.removeprefix("hf:")
    return f"""---
library_name: transformers
tags: [rankwise, low-rank]
---

# {Path(base).name or name}, compressed

{plan.keep():.1%} of the parameters of `{base or name}`, by [rankwise](https://pypi.org/project/rankwise/)
{__version__} (method `{plan.method}`).

```python
import rankwise.hf
from transformers import {auto}

model = {auto}.from_pretrained("this folder")
```

```
{plan.summary()}
```
"""
