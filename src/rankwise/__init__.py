"""rankwise: decides for every layer of a trained network how to decompose it, and how far."""

from rankwise import networks
from rankwise.compression import compress
from rankwise.core.layer import Coverage, Layer, Skipped
from rankwise.errors import RankwiseError
from rankwise.methods import METHODS, Method, allocate, build_table
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Choice, Plan, Pruned
from rankwise.planning.table import Table
from rankwise.planning.times import Times
from rankwise.surgery.checkpoint import load, save
from rankwise.surgery.coverage import find_layers
from rankwise.surgery.fuse import fuse
from rankwise.surgery.modules import GroupedLinear
from rankwise.surgery.replace import apply_plan, apply_plan_, densify, densify_
from rankwise.timing.clock import Timing, time_network
from rankwise.timing.cost_model import measure_times
from rankwise.version import __version__

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
    "build_table",
    "compress",
    "densify",
    "densify_",
    "find_layers",
    "fuse",
    "load",
    "measure_times",
    "networks",
    "save",
    "time_network",
]
