"""From a MODEL specification (see `spec`) to a network."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from torch import nn

from rankwise.core import files
from rankwise.core.disk import why
from rankwise.core.shards import UNREADABLE
from rankwise.errors import RankwiseError, need
from rankwise.models import factory
from rankwise.models.pretrained import (
    KEYS,
    check_timm_weights,
    check_weights_name,
    download,
    is_random,
    wants_weights,
    without_weights,
)
from rankwise.models.spec import Spec, near, parse
from rankwise.models.vision import import_torchvision
from rankwise.models.weights import load_weights_
from rankwise.models.zoo import NETWORKS

__all__ = [
    "architecture",
    "build",
    "default_input",
    "fit_spec",
    "has_random_weights",
    "is_folder_for_transformers",
    "load",
    "load_weights_",
]

WEIGHTS = "model.safetensors"

# Arguments of torchvision's and timm's constructors that would download something or unpickle a file; but for
# ?weights= (torchvision) and ?pretrained (timm), which models/pretrained.py reads.
_FORBIDDEN = ("weights", "pretrained", "checkpoint", "cache")


def build(spec: str, *, allow_code: bool = True, base: str | None = None) -> nn.Module:
    """The network of a MODEL specification, on the CPU.

    Weights are random unless it is a folder, a factory that loads its own, or a specification that asks for trained
    ones (`torchvision:NAME?weights=DEFAULT`, `timm:NAME?pretrained`, `hf:FOLDER`).

    `base`, for a folder only, is the network to rebuild instead of the one that the folder's plan.json
    names. A folder may come from anywhere, so code that its plan names is never run: such a network has to
    be given as `base`. `allow_code=False` refuses `file.py:factory` there too.
    """
    return _build(parse(spec), allow_code, base, ())


def default_input(spec: str) -> tuple[int, ...] | None:
    """Shape of one example input, N×C×H×W (video: N×C×T×H×W); None where only the user can know."""
    parsed = parse(spec)
    seen: tuple[Path, ...] = ()
    while parsed.kind == "folder":
        seen = _visit(parsed, seen)
        parsed = _base_of(parsed)
    if parsed.kind == "own":
        n, channels, height, width = NETWORKS[parsed.name].input
        side = parsed.options.get("image_size")
        return (n, parsed.options.get("in_channels", channels), side or height, side or width)
    if parsed.kind == "torchvision":
        return _torchvision_input(parsed)
    return _timm_input(parsed) if parsed.kind == "timm" else None


def has_random_weights(spec: str) -> bool:
    """Whether `build` gives this specification random weights."""
    return is_random(parse(spec))


def architecture(spec: str) -> str:
    """What a folder's network was made from, for a folder that `train` or `compress` wrote; otherwise `spec` itself,
    without the weights that it asks for."""
    parsed = parse(spec)
    seen: tuple[Path, ...] = ()
    while parsed.kind == "folder":
        seen = _visit(parsed, seen)
        parsed = _base_of(parsed)
    return without_weights(parsed).text


def fit_spec(spec: str, classes: int, channels: int, side: int | None) -> str:
    """The specification with the arguments that make the network fit data of so many classes, channels and pixels.

    >>> fit_spec("resnet20", classes=10, channels=1, side=8)
    'resnet20?in_channels=1&image_size=8'
    >>> fit_spec("torchvision:resnet18", classes=10, channels=3, side=224)
    'torchvision:resnet18?num_classes=10'

    What the specification says itself stays. A factory in a file and a folder have to fit as they are.
    """
    parsed = parse(spec)
    if parsed.kind == "own":
        _, own_channels, own_side, _ = NETWORKS[parsed.name].input
        wanted = {"num_classes": (classes, 10), "in_channels": (channels, own_channels), "image_size": (side, own_side)}
    elif parsed.kind == "torchvision":
        wanted = {"num_classes": (classes, 1000)}
    elif parsed.kind == "timm":
        wanted = {"num_classes": (classes, 1000), "in_chans": (channels, 3)}
    else:
        return spec
    added = [
        f"{key}={value}"
        for key, (value, default) in wanted.items()
        if value not in (None, default) and key not in parsed.options
    ]
    return "&".join([spec if "?" in spec or not added else f"{spec}?{added.pop(0)}", *added])


def _build(spec: Spec, allow_code: bool, base: str | None, seen: tuple[Path, ...]) -> nn.Module:
    if spec.kind == "folder":
        return _rebuild(spec, allow_code, base, seen)
    if base is not None:
        raise RankwiseError(f"base={base!r} was given, but {spec.text!r} is no folder with a plan: leave it out")
    if spec.kind == "file":
        if not allow_code:
            raise RankwiseError(f"{spec.text!r} would run code from a file, which is switched off here")
        return factory.call_from_file(spec)
    if spec.kind == "hf":
        from rankwise.models import huggingface

        return huggingface.open_network(spec)
    make = {"own": _own, "torchvision": _torchvision, "timm": _timm}[spec.kind]
    return factory.call(make(spec), spec)


def _rebuild(spec: Spec, allow_code: bool, base: str | None, seen: tuple[Path, ...]) -> nn.Module:
    seen = _visit(spec, seen)
    if base is None and is_folder_for_transformers(spec.name):
        from rankwise.models import huggingface

        return huggingface.open_network(Spec(spec.text, "hf", spec.name, {}))
    inner = _base_of(spec) if base is None else parse(base)
    if base is None and inner.kind == "file":
        raise RankwiseError(
            f"{spec.text} was made from {inner.text!r}, and code that a folder names is not run: "
            f"give the factory yourself with --base {inner.text} (in Python: base=)"
        )
    model = _build(inner, allow_code and base is not None, None, seen)
    if not _is_compressed(spec):
        load_weights_(model, Path(spec.name) / WEIGHTS)
        return model
    from rankwise.surgery import checkpoint

    return checkpoint.load(spec.name, model)


def is_folder_for_transformers(folder: str) -> bool:
    """Whether `compress` wrote this folder for a network of transformers: it needs no base."""
    from rankwise.surgery.pretrained_folder import plan_in

    return plan_in(Path(folder)) is not None


def load(folder: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The compressed network in a folder, as `save` wrote it. Nothing in the folder is executed.

    Args:
        folder: what `save` or `rankwise compress` wrote.
        model: the kind of network that the plan was made for; its weights do not matter. Not needed where the folder
            says what it is: a network of transformers, or one that a MODEL specification names.

    Returns:
        The compressed network, equal to the saved one to the last digit.

    >>> import tempfile, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    >>> small, plan = rw.compress(model, method="svd", keep=0.7)
    >>> folder = tempfile.mkdtemp()
    >>> rw.save(small, plan, folder)
    >>> sum(p.numel() for p in rw.load(folder, model).parameters()) == plan.after.params
    True
    """
    from rankwise.surgery import checkpoint

    if model is not None:
        return checkpoint.load(folder, model)
    if not os.path.isdir(folder):
        raise RankwiseError(f"{folder} is not a folder: give one that rankwise.save or rankwise compress wrote")
    if not is_folder_for_transformers(str(folder)):
        made_from = checkpoint.read_plan(folder).model
        try:
            parse(made_from)
        except RankwiseError:
            raise RankwiseError(
                f"{folder} was made from {made_from!r}, which cannot be built from its name: give the torch.nn.Module "
                "that it was made from, too"
            ) from None
    return _build(Spec(str(folder), "folder", str(folder), {}), True, None, ())


def _is_compressed(folder: Spec) -> bool:
    from rankwise.surgery import checkpoint

    return checkpoint.is_compressed(folder.name)


def _base_of(folder: Spec) -> Spec:
    if _is_compressed(folder):
        from rankwise.surgery import checkpoint

        model = checkpoint.read_plan(folder.name).model
    else:
        model = _trained_network(Path(folder.name) / WEIGHTS)
    try:
        return without_weights(parse(model))
    except RankwiseError as err:
        raise RankwiseError(
            f"{folder.name} was made from {model!r}, which cannot be built from its name: "
            "give the network it was made from with --base (in Python: base=)"
        ) from err


def _trained_network(path: Path) -> str:
    """The specification that `rankwise train` wrote into the header of its weights."""
    header = {}
    if path.is_file():
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get("rankwise", "{}")
        except UNREADABLE as err:
            raise RankwiseError(f"{path} is damaged or cut short ({why(err)}): restore it or train again") from None
        header = files.parse(text, f"the header of {path}")
    if not isinstance(header.get("network"), str):
        raise RankwiseError(
            f"{path.parent} has no plan.json and no network that `rankwise train` finished: "
            "give a folder that `rankwise compress` or `rankwise train` wrote"
        )
    return cast(str, header["network"])


def _visit(folder: Spec, seen: tuple[Path, ...]) -> tuple[Path, ...]:
    """A network compressed twice names the first folder as its base; a forged plan could name itself."""
    path = Path(folder.name).resolve()
    if path in seen:
        raise RankwiseError(f"the plan in {folder.name} names that folder as its own base: give another --base")
    return (*seen, path)


def _own(spec: Spec) -> Callable[..., nn.Module]:
    return partial(_sized, NETWORKS[spec.name].make)


def _sized(make: Callable[..., nn.Module], image_size: int = 32, **options: Any) -> nn.Module:
    """`image_size` only says what inputs look like: our networks take the mean over whatever is left."""
    if type(image_size) is not int or image_size < 1:
        raise RankwiseError(f"image_size={image_size} was given: give a number of pixels, such as 32")
    return make(**options)


def _torchvision(spec: Spec) -> Callable[..., nn.Module]:
    _only_architecture(spec)
    builder = _torchvision_builder(spec)
    fixed: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        fixed["weights_backbone"] = None  # segmentation and detection would download one otherwise
    if spec.name in ("googlenet", "inception_v3"):
        fixed["init_weights"] = True  # what they do anyway, but with a warning
    if wants_weights(spec):
        weights = import_torchvision().models.get_model_weights(spec.name)
        check_weights_name(spec, weights)
        fixed.pop("init_weights", None)
        return lambda **options: download(builder, spec, {**fixed, "progress": False, **options})
    return lambda **options: builder(**{**fixed, **options})


def _torchvision_builder(spec: Spec) -> Callable[..., nn.Module]:
    models = import_torchvision().models
    names = models.list_models()
    if spec.name not in names:
        raise RankwiseError(f"torchvision has no network {spec.name!r}: {near(spec.name, names)}")
    return cast(Callable[..., nn.Module], models.get_model_builder(spec.name))


def _timm(spec: Spec) -> Callable[..., nn.Module]:
    _only_architecture(spec)
    timm = _import_timm(spec)
    if wants_weights(spec):
        check_timm_weights(spec, timm.list_pretrained())
        return lambda **options: download(partial(timm.create_model, spec.name), spec, options)
    return lambda **options: cast(nn.Module, timm.create_model(spec.name, pretrained=False, **options))


def _import_timm(spec: Spec) -> Any:
    import_torchvision()  # timm imports it too, and would fail where only our way of importing works
    timm = need("timm", extra="vision", purpose="a timm network")
    # Only names from its own lists: create_model would also follow hf-hub: and local-dir:.
    if spec.name not in timm.list_models() and spec.name not in timm.list_pretrained():
        raise RankwiseError(f"timm has no network {spec.name!r}: {near(spec.name, timm.list_models())}")
    return timm


def _only_architecture(spec: Spec) -> None:
    for key in spec.options:
        if key.startswith(_FORBIDDEN) and key != KEYS[spec.kind]:
            raise RankwiseError(
                f"{spec.text!r} asks for {key}, but a specification gives the architecture only: "
                f"leave it out, load the weights from a file, or ask for trained ones with {KEYS[spec.kind]}"
            )


def _torchvision_input(spec: Spec) -> tuple[int, ...] | None:
    module = _torchvision_builder(spec).__module__
    if ".optical_flow." in module:
        return None  # takes two images
    if ".video." in module:
        side = 112 if module.endswith(".resnet") else 224
        return (1, 3, 16, side, side)
    side = spec.options.get("image_size", 299 if "inception" in spec.name else 224)
    return (1, 3, side, side)


def _timm_input(spec: Spec) -> tuple[int, ...]:
    channels, height, width = _import_timm(spec).get_pretrained_cfg(spec.name).input_size
    side = spec.options.get("img_size")
    return (1, spec.options.get("in_chans", channels), side or height, side or width)
