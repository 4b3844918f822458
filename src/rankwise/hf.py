"""`import rankwise.hf`: transformers opens networks that rankwise compressed, without any code from their folder.

    import rankwise.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("out/")     # the compressed network, of plain modules
    model.save_pretrained("again/")                          # opens in the same way

The layers that the plan names become its pairs before weights are read (the hooks that transformers has for
quantisation). Pairs are plain modules, so `generate`, training and PEFT work on them: `factor_names(model)` is what
adapters are put on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from rankwise.core.layer import Layer
from rankwise.errors import RankwiseError, need
from rankwise.planning.plan import Choice, Plan
from rankwise.surgery.checkpoint import hashes, read_plan
from rankwise.surgery.fuse import fuse_norms_
from rankwise.surgery.layout import lay_out_
from rankwise.surgery.modules import GroupedLinear, describe, is_lookup, kind_of, mark_of
from rankwise.surgery.pretrained_folder import METHOD, NEEDED, read_plan_of
from rankwise.surgery.replace import replace_layers_
from rankwise.surgery.weights_file import read_header
from rankwise.version import __version__

__all__ = ["RankwiseConfig", "RankwiseQuantizer", "factor_names"]

_quantizers = need("transformers.quantizers", extra="hf", purpose="rankwise.hf")
_auto = need("transformers.quantizers.auto", extra="hf", purpose="rankwise.hf")
_configs = need("transformers.utils.quantization_config", extra="hf", purpose="rankwise.hf")


@_auto.register_quantization_config(METHOD)
class RankwiseConfig(_configs.QuantizationConfigMixin):  # type: ignore[misc,name-defined]
    """`quantization_config` of config.json: which plan the weights follow, and the version that wrote it."""

    def __init__(self, plan: dict[str, Any], version: str = "", quant_method: str = METHOD, **_: Any) -> None:
        self.quant_method, self.version, self.plan = quant_method, version, plan

    @property
    def decisions(self) -> Plan:
        return read_plan_of(self.to_dict(), "config.json")


@_auto.register_quantizer(METHOD)
class RankwiseQuantizer(_quantizers.HfQuantizer):  # type: ignore[misc,name-defined]
    """Puts the pairs of the plan in place before transformers reads the weights."""

    requires_calibration = True  # a network is compressed by `rankwise compress`, not while it is opened

    def validate_environment(self, *_: Any, **__: Any) -> None:
        _ = self.quantization_config.decisions  # a plan of a newer format says so here

    def update_attn_implementation(self, config: Any) -> Any:
        """Take out what stops those who do not know this method (surgery/pretrained_folder.py)."""
        for name in ("transformers_weights", "fusion_config"):
            if hasattr(config, name):
                delattr(config, name)
        return config

    def _process_model_before_weight_loading(self, model: Any, **given: Any) -> Any:
        plan = _plan_of(given.get("checkpoint_files") or (), self.quantization_config.decisions)
        self.quantization_config.plan = plan.to_json()
        put_pairs_(model, plan)
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        _mark_(model)
        lay_out_(model, self.quantization_config.decisions.layout)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[None, dict[str, str]]:
        return None, {"rankwise": json.dumps({**hashes(self.quantization_config.decisions), "same": {}, "modules": {}})}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def attach_(model: nn.Module, plan: Plan) -> None:
    """Give a network that was compressed in this process what one from a folder has, so `save_pretrained` works."""
    network: Any = model
    network.config.quantization_config = RankwiseConfig(plan.to_json(), __version__)
    network.hf_quantizer = RankwiseQuantizer(network.config.quantization_config)
    _tie_(model, {choice.name: choice.heads for choice in plan.choices})
    _mark_(model)


def _mark_(model: Any) -> None:
    """Its modules are plain: it may be trained and cast like any other, which quantised networks may not."""
    model.config.fusion_config = {NEEDED: True}  # `save_pretrained` writes it; nobody reads it from here
    for module in model.modules():
        if getattr(module, "is_quantized", False):
            module.is_quantized = False


def _plan_of(paths: Any, plan: Plan) -> Plan:
    """The plan that the weights follow: that of config.json, or one beside it if `save` was killed between the files.

    Weights and a plan that do not belong together would leave layers without their weights.
    """
    for path in paths:
        stated = read_header(Path(path)).get("decisions")
        if stated == hashes(plan)["decisions"]:
            continue
        other = read_plan(Path(path).parent)
        if stated != hashes(other)["decisions"]:
            raise RankwiseError(
                f"{path} and config.json beside it do not belong together: one of them was changed; save it again"
            )
        plan = other
    return plan


def put_pairs_(model: nn.Module, plan: Plan) -> None:
    """The modules of a plan in a network whose weights are not there yet; a file sets them.

    The network may be a part of the one that the plan was made for, or that with another head: names differ by the
    prefix of the common part, and choices for layers that it does not have mean nothing.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {
        entry.name: _here(entry.name, modules, str(getattr(model, "base_model_prefix", ""))) for entry in plan.layers
    }
    chosen = [replace(choice, name=str(names[choice.name])) for choice in plan.choices if names[choice.name]]
    if plan.choices and not chosen:
        raise RankwiseError(
            f"the plan was made for another model: {type(model).__name__} has no layer {plan.choices[0].name!r}"
        )
    matches = [(choice, _described(choice, modules)) for choice in chosen]
    for choice, layer in matches:
        choice.check(layer)
    pruned = tuple(entry for entry in plan.pruned if names[entry.name] == entry.name)
    replace_layers_(model, replace(plan, layers=(*chosen, *pruned)), fill=False, layers=matches)
    fuse_norms_(model, plan.fused, fill=False)
    _tie_(model, {choice.name: layer.heads for choice, layer in matches})
    for module in model.modules():
        # transformers initialises some layers through the module that holds them, and would not find their weight
        # (one with buffers of its own, such as the numbers of positions, must be: no file has them)
        if not module._buffers and any(mark_of(child) is not None for child in module.children()):
            module._is_hf_initialized = True  # type: ignore[assignment]


def _tie_(model: Any, heads: dict[str, tuple[str, ...]]) -> None:
    """Tell transformers which factors share a weight, in place of the layers that did."""
    tied = {
        f"{head}.weight": (f"{head}.decoder.weight", f"{name}.encoder.weight")
        for name, mine in heads.items()
        for head in mine
    }
    if not tied:
        return
    for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
        known = getattr(model, attribute, None)
        if isinstance(known, dict):
            kept = {target: source for target, source in known.items() if target not in tied}
            setattr(model, attribute, {**kept, **dict(tied.values())})


def _here(name: str, modules: dict[str, nn.Module], prefix: str) -> str | None:
    """What a layer is called in this network."""
    for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if candidate in modules:
            return candidate
    return None


def _described(choice: Choice, modules: dict[str, nn.Module]) -> Layer:
    """The layer of a choice; of an embedding with those of its heads that are here."""
    heads = tuple(head for head in choice.heads if head in modules)
    layer = describe(_layer(choice, modules), choice.name)
    for head in heads:
        weight = getattr(modules[head], "weight", None)
        if kind_of(modules[head]) is None or tuple(getattr(weight, "shape", ())) != layer.shape:
            raise RankwiseError(
                f"the plan was made for another model: {head!r} is no layer here that shares the weight of "
                f"{choice.name!r}"
            )
    return replace(layer, heads=heads)


def _layer(choice: Choice, modules: dict[str, nn.Module]) -> nn.Module:
    module = modules[choice.name]
    if kind_of(module) is None and not is_lookup(module):
        raise RankwiseError(
            f"the plan was made for another model: layer {choice.name!r} is {type(module).__name__} here, "
            f"and {choice.kind!r} in the plan"
        )
    return module


def factor_names(model: nn.Module) -> list[str]:
    """The names of all linear factors of a compressed network, for adapters.

    `peft.LoraConfig(target_modules=rankwise.hf.factor_names(model))` trains adapters on them, and `merge_and_unload`
    merges these into the factors, which keep their ranks. A factor that an embedding shares is not among them: what is
    merged into it would change the embedding too.
    """
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    pairs = [(name, module) for name, module in model.named_modules() if mark_of(module) is not None]
    return [
        f"{name}.{part}"
        for name, pair in pairs
        for part, module in pair.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, GroupedLinear) and id(module.weight) not in shared
    ]
