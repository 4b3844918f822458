"""What is asked of a compression, whatever the network and the budget are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rankwise.calibration.activations import Data
from rankwise.calibration.distill import read_effort
from rankwise.methods import SettingChanges, needs_data, settings_for
from rankwise.planning.plan import Plan
from rankwise.planning.table import Progress
from rankwise.timing.clock import Timing


@dataclass(frozen=True)
class Request:
    """A method, changes to its settings, and what is done with the network afterwards.

    Of `changes`, those that are None leave the method's own setting. `recover` are steps of distillation, or seconds
    ("90s"). `fuse` folds batch norms; None does so for budgets in latency only. `name` is what the plan calls the
    network, its class unless given. So many inputs are taken to `calibrate`, of data that is given by its name; None
    takes as many as the time allows.
    Decompositions are computed on the CPU unless `device` names another place (core/linalg.py).
    `input` is the part of a batch of the data that the network takes, by index or name.
    `plan` holds decisions that are made already: they are followed, and method, changes and exclude mean nothing.
    """

    method: str = "auto"
    changes: Mapping[str, Any] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    recover: int | str = 0
    fuse: bool | None = None
    timing: Timing | None = None
    name: str = ""
    calibrate: int | None = None
    plan: Plan | None = None
    device: str | torch.device | None = None
    input: int | str | None = None

    @property
    def is_free(self) -> bool:
        """Whether `auto` may look at inputs: not if an error or decompositions are asked for."""
        asked = self.changes.get("error"), self.changes.get("decompositions")
        return self.method == "auto" and asked == (None, None)

    @property
    def recovers(self) -> bool:
        return not read_effort(self.recover).none

    @property
    def looks_at_data(self) -> bool:
        """Whether calibration data would be used, if there were any."""
        if self.plan is not None or self.is_free or self.recovers:
            return True
        others = {key: value for key, value in self.changes.items() if key != "rank_multiple"}  # may be "measured"
        return needs_data(settings_for(self.method, **others))


class CompressOptions(SettingChanges, total=False):
    """What `rankwise.compress` takes beside model, example, method, keep and macs. Every key may be left out.

    Units that a user adds to the registry (planning/units.py) are keywords, too.
    """

    latency: float | None  # the fraction of the measured time that may remain
    exclude: Iterable[str] | str  # names or patterns of layers to leave alone
    data: Data | str | None  # inputs without labels, or the name of a data set
    input: int | str | None  # which part of a batch of the data the network takes, where that is not clear
    recover: int | str  # steps of distillation from the original network, or seconds: "90s"
    timing: Timing | None  # how times are measured
    fuse: bool | None  # fold batch norms into the layers before them
    name: str  # what the plan calls the network
    device: str | torch.device | None  # where decompositions are computed
    progress: Progress | None  # called with a layer's name, how many are done, and how many there are
