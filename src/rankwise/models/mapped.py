"""Networks of transformers whose weights stay in their files until they are used: `open_mapped`.

Parameters are made without memory, and then become views of the mapped safetensors files, in the precision of the
files. The system reads a page when something looks at it, and may forget it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rankwise.calibration.shelf import KINDS
from rankwise.core import files
from rankwise.core.disk import why
from rankwise.core.shards import UNREADABLE, read_index
from rankwise.data.tokens import CAUSAL, role_of
from rankwise.errors import RankwiseError
from rankwise.models.huggingface import class_of, config_of, quiet
from rankwise.models.spec import parse

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
LARGE = 10**9  # bytes of weights from which on a network is compressed block by block


def is_large(text: str) -> bool:
    """Whether a specification is a folder of transformers with more weights than are opened at once."""
    spec = parse(text)
    if spec.kind != "hf" or set(spec.options) or not os.path.isdir(spec.name):
        return False
    return sum(path.stat().st_size for path in Path(spec.name).glob("*.safetensors")) > LARGE


def open_mapped(text: str) -> nn.Module:
    """The network of `hf:FOLDER`, one that predicts the next token, in eval mode, with its weights mapped."""
    spec = parse(text)
    if spec.kind != "hf" or not os.path.isdir(spec.name) or set(spec.options):
        raise RankwiseError(f"{text!r} was given: only hf:FOLDER, without options, is taken block by block")
    with quiet():
        config = config_of(spec, {})
        with _without_memory():
            network: Any = class_of(spec, None, config)(config)
    _fill_(network, _tensors(Path(spec.name)))
    network.tie_weights()
    network.config.name_or_path = spec.name
    missing = [name for name, p in network.named_parameters() if p.is_meta]
    if missing:
        raise RankwiseError(f"{spec.name} has no weights for {missing[0]}: get the rest of the files, or --no-blocks")
    if role_of(network) != CAUSAL:
        raise RankwiseError(f"{text!r} does not predict the next token: such networks are opened whole (--no-blocks)")
    found: nn.Module = network.eval()
    return found


@contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters have a shape and no numbers; buffers are computed as ever."""
    register = nn.Module.register_parameter

    def light(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    everything: Any = nn.Module
    everything.register_parameter = light
    try:
        yield
    finally:
        everything.register_parameter = register


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder by name: views of its files, which are not read yet."""
    names = [ALONE]
    if not os.path.isfile(folder / ALONE):
        names = sorted(read_index(files.read(folder / INDEX), str(folder / INDEX)))
    found: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt", device="cpu") as file:
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except UNREADABLE as err:
            raise RankwiseError(
                f"{folder / name} is missing, damaged or cut short ({why(err)}): get it again"
            ) from None
    return found


def _fill_(network: Any, tensors: dict[str, Tensor]) -> None:
    """Every parameter that the files have. Some files leave out the name of the trunk, or have it where it is not."""
    trunk = str(getattr(network, "base_model_prefix", ""))
    for name, module in network.named_modules():
        for own, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            whole = f"{name}.{own}" if name else own
            keys = (whole, whole.removeprefix(f"{trunk}."), f"{trunk}.{whole}")
            value = next((tensors[key] for key in keys if key in tensors), None)
            if value is None:
                continue
            if value.shape != parameter.shape:
                raise RankwiseError(
                    f"the files have {whole} as {tuple(value.shape)}, and config.json says {tuple(parameter.shape)}"
                )
            if value.dtype not in KINDS:
                raise _odd(whole, value)
            module._parameters[own] = nn.Parameter(value, requires_grad=False)
    with torch.no_grad():
        for name, module in network.named_modules():
            for own, buffer in list(module._buffers.items()):
                key = f"{name}.{own}" if name else own
                if buffer is not None and key in tensors and tensors[key].shape == buffer.shape:
                    if tensors[key].is_complex():
                        raise _odd(key, tensors[key])
                    buffer.copy_(tensors[key])


def _odd(name: str, value: Tensor) -> RankwiseError:
    return RankwiseError(f"the files have {name} as {value.dtype}, which is not taken block by block: add --no-blocks")
