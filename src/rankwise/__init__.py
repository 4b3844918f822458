"""rankwise: decides for every layer of a trained network how to decompose it, and how far."""

from rankwise import networks
from rankwise.budget import Budget
from rankwise.checkpoint import load, save
from rankwise.coverage import find_layers
from rankwise.errors import RankwiseError
from rankwise.fuse import fuse
from rankwise.job import compress
from rankwise.latency import Timing, time_network
from rankwise.layer import Coverage, Layer, Skipped
from rankwise.methods import METHODS, Method, allocate, build_table
from rankwise.modules import GroupedLinear
from rankwise.plan import Choice, Plan, Pruned
from rankwise.stopwatch import measure_times
from rankwise.surgery import apply_plan, apply_plan_, densify, densify_
from rankwise.table import Table
from rankwise.times import Times
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
