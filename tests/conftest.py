"""Settings for every test: one thread, and the same examples on every machine."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from rankwise.cli import progress
from rankwise.timing import cost_model

torch.set_num_threads(1)
settings.register_profile(
    "deterministic",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("deterministic")


@pytest.fixture(scope="session", autouse=True)
def _times_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Measured times are kept for this run only, and nobody's own are read."""
    os.environ["RANKWISE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    progress.BEAT = 1e6  # seconds: whether a line of progress is seen would depend on the machine
    cost_model.SECONDS = 2.0  # what is measured matters to no test
    os.getloadavg = lambda: (0.0, 0.0, 0.0)  # nor what else this machine does
