"""Settings for every test: one thread, the same examples on every machine, signals as in a terminal."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from rankwise.cli import progress
from rankwise.timing import cost_model

torch.set_num_threads(1)
# A shell starts background jobs with Ctrl-C ignored, and children of tests would inherit that.
for _sign in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
    if signal.getsignal(_sign) is signal.SIG_IGN:
        signal.signal(_sign, signal.default_int_handler if _sign == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
settings.register_profile(
    "deterministic",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("deterministic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and the tests of each file, in random order")
    parser.addoption(
        "--cpu", type=int, metavar="N", help="show the N tests that take most of the processor (with -n 0)"
    )


_SPENT: dict[str, float] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Seconds of the processor, those of processes that the test waited for included."""
    start = sum(os.times()[:4])
    yield
    _SPENT[item.nodeid] = sum(os.times()[:4]) - start


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.getoption("--cpu") or 0
    for name in sorted(_SPENT, key=_SPENT.__getitem__, reverse=True)[:count]:
        terminalreporter.write_line(f"{_SPENT[name]:8.2f} CPU s  {name}")
    if count:
        terminalreporter.write_line(f"{sum(_SPENT.values()):8.2f} CPU s  all {len(_SPENT)} tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a file stay together: fixtures of a file are made once."""
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    draw = random.Random(seed)
    place = {path: draw.random() for path in sorted({item.path for item in items})}
    order = {item.nodeid: draw.random() for item in sorted(items, key=lambda item: item.nodeid)}
    items.sort(key=lambda item: (place[item.path], order[item.nodeid]))


@pytest.fixture(scope="session", autouse=True)
def _times_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Measured times are kept for this run only, and nobody's own are read."""
    os.environ["RANKWISE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    progress.BEAT = 1e6  # seconds: whether a line of progress is seen would depend on the machine
    cost_model.SECONDS = 2.0  # what is measured matters to no test
    os.getloadavg = lambda: (0.0, 0.0, 0.0)  # nor what else this machine does
