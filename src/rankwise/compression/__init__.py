"""The whole job: from a model and a budget to a plan, and from a plan to a smaller network."""

from rankwise.compression.job import (
    Planner,
    Seen,
    build_network,
    compress,
    finish,
    folds_norms,
    is_free,
    kept_in_time,
    planner,
    recovered,
    seen_for,
    times_for,
    with_multiple,
)

__all__ = [
    "Planner",
    "Seen",
    "build_network",
    "compress",
    "finish",
    "folds_norms",
    "is_free",
    "kept_in_time",
    "planner",
    "recovered",
    "seen_for",
    "times_for",
    "with_multiple",
]
