"""`rankwise.compress`: keywords to a request and a budget, and the whole job in one call."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Unpack, cast

from torch import nn

from rankwise.compression.job import Compression
from rankwise.compression.request import CompressOptions, Request
from rankwise.methods import needs_budget
from rankwise.planning.budget import Budget
from rankwise.planning.plan import Plan
from rankwise.planning.units import MACS, PARAMS, UNITS
from rankwise.surgery.forward import Example


def split_options(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Take budgets, data and progress, and what a `Request` holds out of keywords; changes of settings are left."""
    units = {unit: given.pop(unit) for unit in UNITS if unit in given}  # latency, and what else the registry has
    kept = {key: given.pop(key, None) for key in ("data", "progress")}
    asked: dict[str, Any] = {
        key: given.pop(key) for key in ("recover", "fuse", "timing", "name", "device", "input") if key in given
    }
    exclude = given.pop("exclude", None) or ()
    asked["exclude"] = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    return units, kept, asked


def compress(
    model: nn.Module,
    example: Example | None = None,
    method: str = "auto",
    keep: float | None = None,
    macs: float | None = None,
    **options: Unpack[CompressOptions],
) -> tuple[nn.Module, Plan]:
    """The whole job: a smaller copy of the model, and the plan it follows.

    Args:
        model: any network; it is left as it is.
        example: an input: a tensor, a tuple of arguments or a dict of keyword arguments. Budgets in macs and latency
            need one, and `auto` makes synthetic images of its size where there is no data.
        method: a name of `rankwise.METHODS`.
        keep: the fraction of all parameters that may remain, or their number.
        macs: the same for multiply-adds. `latency=` is the same for the measured time; only tucker2 can do without any.
        options: `data=` inputs without labels (a DataLoader, a list of batches, a name such as "digits") for methods
            that look at activations; `recover=` so many steps of distillation from the original at the end, or "90s";
            `exclude=` layers to leave alone; `fuse=` folds batch norms, which a budget in latency does unless it is
            False; `device=` where decompositions are computed; all others are settings of the method. See
            `CompressOptions`, and `SettingChanges` for settings.

    Returns:
        The smaller network, of plain modules, and its plan.

    >>> import torch, rankwise as rw
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    >>> x = torch.randn(1, 3, 8, 8)
    >>> small, plan = rw.compress(model, x, method="svd", keep=0.6)
    >>> plan.keep() <= 0.6, small(x).shape == model(x).shape
    (True, True)
    """
    given = cast(dict[str, Any], dict(options))
    units, kept, asked = split_options(given)
    progress, request = kept["progress"], Request(method, given, **asked)
    sizes = {PARAMS.name: keep, MACS.name: macs, **units}
    budget = Budget(**sizes) if any(value is not None for value in sizes.values()) else None
    job = Compression(
        model, example, request, kept["data"], None if progress is None else lambda _: nullcontext(progress)
    )
    if budget is None and needs_budget(job.settings):
        budget = Budget()  # which says what it needs
    return job.run(budget)
