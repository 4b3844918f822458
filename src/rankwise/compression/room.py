"""What a compression is certain to take, compared with a limit of memory before the work."""

from __future__ import annotations

from torch import nn

from rankwise.calibration.effect_table import needed
from rankwise.core.layer import LOOKUP, Coverage
from rankwise.core.memory import check_room

WORKING = 8  # bytes: every weight of a layer as it is decomposed, in double precision


def check_memory(model: nn.Module, coverage: Coverage, copies: bool, collects: bool) -> None:
    """Refuse a job whose copy of the network, and its largest layer on top of it, exceed a limit of this process.

    `collects`: statistics of inputs are kept, too. It is the least that is needed; what turns out not to fit later is
    one sentence then.
    """
    copy = float(sum(p.nbytes for p in model.parameters())) if copies else 0.0
    sizes = {
        layer.name: needed(layer) if collects else WORKING * float(layer.params)
        for layer in coverage.layers
        if layer.kind != LOOKUP
    }
    name, own = max(sizes.items(), key=lambda item: item[1], default=("", 0.0))
    what = ["a copy of the network"] * copies + [f"layer {name!r}"] * bool(name)
    check_room(copy + own, " and ".join(what))
