"""rankwise: decides for every layer of a trained network how to decompose it, and how far.

Names are imported when they are first used, so that `rankwise --help` answers without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise import torchvision_import
from rankwise.errors import RankwiseError
from rankwise.version import __version__

if TYPE_CHECKING:
    from rankwise import networks
    from rankwise.api import bench, evaluate, export, forecast, retrain, smallest
    from rankwise.compression import compress
    from rankwise.core.layer import Coverage, Layer, Skipped
    from rankwise.methods import METHODS, Method, allocate, build_table
    from rankwise.models.networks import load
    from rankwise.planning.budget import Budget
    from rankwise.planning.plan import Choice, Plan, Pruned
    from rankwise.planning.table import Table
    from rankwise.planning.times import Times
    from rankwise.surgery.checkpoint import save
    from rankwise.surgery.coverage import find_layers
    from rankwise.surgery.fuse import fuse
    from rankwise.surgery.modules import GroupedLinear
    from rankwise.surgery.replace import apply_plan, apply_plan_, densify, densify_
    from rankwise.timing.clock import Timing, time_network
    from rankwise.timing.cost_model import measure_times

torchvision_import.install()

_WHERE = {
    "api": "bench evaluate export forecast retrain smallest",
    "compression": "compress",
    "core.layer": "Coverage Layer Skipped",
    "methods": "METHODS Method allocate build_table",
    "planning.budget": "Budget",
    "planning.plan": "Choice Plan Pruned",
    "planning.table": "Table",
    "planning.times": "Times",
    "models.networks": "load",
    "surgery.checkpoint": "save",
    "surgery.coverage": "find_layers",
    "surgery.fuse": "fuse",
    "surgery.modules": "GroupedLinear",
    "surgery.replace": "apply_plan apply_plan_ densify densify_",
    "timing.clock": "Timing time_network",
    "timing.cost_model": "measure_times",
}
_MODULE_OF = {name: f"rankwise.{module}" for module, names in _WHERE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "networks":
        return import_module("rankwise.networks")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rankwise' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "METHODS",
    "Budget",
    "Choice",
    "Coverage",
    "GroupedLinear",
    "Layer",
    "Method",
    "Plan",
    "Pruned",
    "RankwiseError",
    "Skipped",
    "Table",
    "Times",
    "Timing",
    "__version__",
    "allocate",
    "apply_plan",
    "apply_plan_",
    "bench",
    "build_table",
    "compress",
    "densify",
    "densify_",
    "evaluate",
    "export",
    "find_layers",
    "forecast",
    "fuse",
    "load",
    "measure_times",
    "networks",
    "retrain",
    "save",
    "smallest",
    "time_network",
]
