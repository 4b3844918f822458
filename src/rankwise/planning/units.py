"""Units of budgets: what a network, a layer and an option have of each, and how it is said.

A unit is a value. To add one, write it here and put it into `UNITS`; budgets, menus, plans, errors and the
command line read all they need from it, and searches see only numbers. Everything is counted in whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from rankwise.core.layer import Coverage, Layer
from rankwise.core.linalg import Ints
from rankwise.core.option import Option
from rankwise.decompositions import costs
from rankwise.errors import RankwiseError
from rankwise.planning.times import MARGIN, Times

# Predicted times are a little off: so much more of the time must go, by prediction, than was asked for.
RESERVE = Fraction(7, 100)


@dataclass(frozen=True)
class Unit:
    """What a budget can be given in. Counts that are not known are None.

    An option must cost less than `margin` times the layer, so that what is called smaller is so by more than
    measurements are off. Of what has to go, `reserve` more is asked for than the budget says.
    """

    name: str  # the keyword of Budget, the key in files, and --budget NAME=VALUE
    whole: Callable[[Coverage, Times | None], int | None]  # of the network as it is
    layer: Callable[[Layer, Times | None], int | None]  # of a layer as it is
    by_rank: Callable[[Layer, Option, Times | None], Ints | None]  # of an option; entry j is what rank j costs
    unknown: str = ""  # the error if a budget is given in it while the whole is not known
    advice: str = ""  # what to do if a plan does not know it
    beside: Callable[[Coverage, Times | None], int] | None = None  # the layers; otherwise the whole without them
    timed: bool = False  # it has to be measured first
    fraction_of: str = ""  # of what it can only be a fraction; empty: it can be a count as well
    margin: float = 1.0
    reserve: Fraction = Fraction(0)
    noun: str | None = None  # behind a number, in place of the name
    show: Callable[[int], str] = "{:,}".format  # a count
    title: str | None = None  # in tables, in place of the name
    recorded: Callable[[float], str] = "{:,}".format  # a number of it that a plan has
    removed: str = ""  # what the removed share of it is called

    def total(self, coverage: Coverage, times: Times | None) -> int:
        """Of the network as it is, or the sentence why that is not known."""
        found = self.whole(coverage, times)
        if found is None:
            raise RankwiseError(self.unknown or f"a budget in {self.name} needs its count, which is not known")
        return found

    def fixed(self, coverage: Coverage, times: Times | None) -> int:
        """What no decision changes."""
        if self.beside is not None:
            return self.beside(coverage, times)
        return self.total(coverage, times) - sum(self.layer(la, times) or 0 for la in coverage.layers)

    def asked(self, value: float, total: int) -> int:
        """The count that a budget names. A fraction means its digits: 0.29 of 100 is 29, not 28.99…96."""
        return math.floor(Fraction(str(float(value))) * total) if value <= 1 else min(int(value), total)

    def limit(self, value: float, total: int) -> int:
        """The count that a plan must not exceed."""
        return total - math.ceil((total - self.asked(value, total)) * (1 + self.reserve))

    def keep_for(self, count: int, total: int) -> float:
        """The least fraction to ask for where so much is needed: `limit` the other way round, rounded up."""
        if not total:
            return 1.0
        spare = 2 if self.reserve else 0  # what rounding to whole numbers, twice, can take away
        return math.ceil(10_000 * (1 - Fraction(total - count - spare, total) / (1 + self.reserve))) / 10_000

    def amount(self, count: int) -> str:
        """A count with its noun: 1,234 params."""
        return f"{self.show(count)} {self.name if self.noun is None else self.noun}".rstrip()


PARAMS = Unit(
    "params",
    whole=lambda coverage, times: coverage.params,
    layer=lambda layer, times: layer.params,
    by_rank=lambda layer, option, times: costs(layer, option)[0],
    removed="CR-P",
)
MACS = Unit(
    "macs",
    whole=lambda coverage, times: coverage.macs,
    layer=lambda layer, times: layer.macs,
    by_rank=lambda layer, option, times: costs(layer, option)[1],
    unknown="a budget in macs needs an example input to count positions: pass one "
    "(on the command line: --input 1,3,224,224)",
    advice="plan with an example input",
    removed="CR-F",
)
LATENCY = Unit(  # nanoseconds; plans record seconds
    "latency",
    whole=lambda coverage, times: None if times is None else times.total,
    layer=lambda layer, times: None if times is None else times.dense(layer.name),
    by_rank=lambda layer, option, times: None if times is None else times.by_rank(layer, option),
    unknown="a budget in latency needs measured times, which methods that remove filters do not have: give an example "
    "input (--input) and another method (in Python, for a table: table.times = rankwise.measure_times(model, example))",
    advice="plan with a budget in latency, or never_slower",
    beside=lambda coverage, times: 0 if times is None else times.fixed,
    timed=True,
    fraction_of="the measured time",
    margin=MARGIN,
    reserve=RESERVE,
    noun="",
    show=lambda count: f"{count / 1e6:.3f} ms",
    title="time (predicted)",
    recorded=lambda seconds: f"{1e3 * seconds:.2f} ms",
)
UNITS: dict[str, Unit] = {unit.name: unit for unit in (PARAMS, MACS, LATENCY)}
