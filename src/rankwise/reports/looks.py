"""How methods are told apart: every method has its own colour and its own marker, the same in every report.

They follow from its place in the registry of methods, so a new method goes to the end of it.
Labels that a study makes up get a look from their name. They keep it from report to report, unless two labels of one
report ask for the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, pi, sin

from rankwise.methods import METHODS

Point = tuple[float, float]

# For white and for dark paper. Tests check the contrast, and how far apart any two of them are, also for colour-blind
# eyes. Those of the methods that are looked at most are the farthest apart.
COLOURS = (
    ("#ce7f07", "#eaa03b"),
    ("#981d72", "#f13fac"),
    ("#6c6c3c", "#90c06c"),
    ("#e448c0", "#f090a8"),
    ("#a80cc0", "#a830cc"),
    ("#0ba872", "#208853"),
    ("#e40c48", "#e43c18"),
    ("#843402", "#fbf024"),
    ("#009dd1", "#4ec9fe"),
    ("#3c9c9c", "#0cfc9c"),
    ("#3018b4", "#b46cd8"),
    ("#141414", "#ecf3f9"),
    ("#482484", "#a890cc"),
    ("#6c243c", "#cc9c84"),
    ("#2d69dd", "#4184ff"),
    ("#004860", "#a8fccc"),
    ("#48609c", "#54d854"),
    ("#906c18", "#c0fc78"),
    ("#6060fc", "#187890"),
    ("#906c78", "#847878"),
    ("#0090f0", "#18d8cc"),
    ("#543c24", "#547800"),
    ("#fc489c", "#d81848"),
    ("#e46c6c", "#9c903c"),
)


def _star(points: int, inner: float, turn: float) -> tuple[Point, ...]:
    """Corners at radius 1 with others at radius `inner` between them; the first one is at `turn` degrees."""
    steps = range(2 * points)
    angles = [turn * pi / 180 + pi * i / points for i in steps]
    radii = [inner if i % 2 else 1.0 for i in steps]
    return tuple((r * cos(a), r * sin(a)) for r, a in zip(radii, angles, strict=True))


def _regular(corners: int, turn: float) -> tuple[Point, ...]:
    return _star(corners, 1.0, turn)[::2]


def _diamond(wide: float, tall: float) -> tuple[Point, ...]:
    return ((0, tall), (wide, 0), (0, -tall), (-wide, 0))


_PLUS: tuple[Point, ...] = (
    *((-0.35, 1.0), (0.35, 1.0), (0.35, 0.35), (1.0, 0.35), (1.0, -0.35), (0.35, -0.35)),
    *((0.35, -1.0), (-0.35, -1.0), (-0.35, -0.35), (-1.0, -0.35), (-1.0, 0.35), (-0.35, 0.35)),
)
# By their names in plotly, as corners for everything else. Larger than 1 where a shape would look small.
SHAPES: dict[str, tuple[Point, ...]] = {
    "square": _regular(4, 45),
    "diamond": _diamond(1.1, 1.1),
    "triangle-right": _regular(3, 0),
    "star-diamond": _star(4, 0.35, 90),
    "bowtie": ((1.0, 0.8), (1.0, -0.8), (-1.0, 0.8), (-1.0, -0.8)),
    "triangle-up": _regular(3, 90),
    "cross": _PLUS,
    "x": tuple(((a - b) * 0.5**0.5, (a + b) * 0.5**0.5) for a, b in _PLUS),
    "triangle-down": _regular(3, -90),
    "triangle-left": _regular(3, 180),
    "pentagon": _regular(5, 90),
    "star": _star(5, 0.4, 90),
    "hourglass": ((-0.8, 1.0), (0.8, 1.0), (-0.8, -1.0), (0.8, -1.0)),
    "hexagon": _regular(6, 90),
    "circle": _regular(24, 0),
    "diamond-tall": _diamond(0.65, 1.25),
    "hexagram": _star(6, 0.58, 90),
    "star-triangle-up": _star(3, 0.38, 90),
    "diamond-wide": _diamond(1.25, 0.65),
    "star-square": _star(4, 0.5, 45),
    "triangle-ne": ((-0.9, 0.9), (0.9, 0.9), (0.9, -0.9)),
    "octagon": _regular(8, 22.5),
    "star-triangle-down": _star(3, 0.38, -90),
    "triangle-sw": ((-0.9, 0.9), (0.9, -0.9), (-0.9, -0.9)),
}
MARKERS = tuple(SHAPES)

# Variants that the shipped studies name, from the end of both lists; methods are counted from the beginning.
_VARIANTS = ("auto, weights alone", "alds, max", "alds+, max, minimax", "alds-simple-5")
_SAME = {"alds-max": "alds, max"}
_DEFAULT = "-3"  # three slices are what these methods have unless told otherwise: `alds-simple-3` is `alds-simple`


@dataclass(frozen=True)
class Look:
    """Colours for white and for dark paper, a marker of plotly, and its corners."""

    light: str
    dark: str
    marker: str
    corners: tuple[Point, ...]


def look(number: int) -> Look:
    """Colour and marker are both unique for the first 24 numbers; no two of the first 576 have both in common."""
    count = len(COLOURS)
    marker = MARKERS[(number + number // count) % count]
    return Look(*COLOURS[number % count], marker, SHAPES[marker])


def look_numbers(labels: Iterable[str]) -> dict[str, int]:
    """The number of every label's look, in the order of the labels. A method has its place in the registry.

    >>> look_numbers(["mine", "auto"])["auto"] == look_numbers(["auto"])["auto"]
    True
    """
    wanted = list(dict.fromkeys(labels))
    known = _known()
    own = {label: known[name] for label in wanted if (name := _name(label)) in known}
    taken = set(own.values())
    for label in sorted(set(wanted) - set(own)):
        own[label] = next(n for n in _candidates(label, len(METHODS)) if n not in taken)
        taken.add(own[label])
    return {label: own[label] for label in wanted}


def _known() -> dict[str, int]:
    last = len(COLOURS) - 1
    return {**{label: last - i for i, label in enumerate(_VARIANTS)}, **{name: i for i, name in enumerate(METHODS)}}


def _name(label: str) -> str:
    plain = label.removesuffix(_DEFAULT)
    return plain if plain in METHODS else _SAME.get(label, label)


def _candidates(label: str, first: int) -> Iterable[int]:
    """Numbers for a label that has none of its own, the best first: unused colours, then pairs that are new."""
    digest = int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big")
    count = len(COLOURS)
    spare = max(0, count - len(_VARIANTS) - first)
    yield from (first + (digest + i) % spare for i in range(spare))
    pairs = count * (count - 1)
    yield from (count + (digest + i) % pairs for i in range(pairs))
    yield from range(count * count, 1_000_000)
