"""The pins of constraints.txt beside what the package index says of them: withdrawn, or with known vulnerabilities.

    python tests/trust/audit.py

PyPI gives the vulnerabilities of a release (the data of pip-audit) at /pypi/NAME/VERSION/json. A mirror may not have
them: a release that is known to be vulnerable is asked for first, so that no answer is not taken for a good one.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PINS = Path(__file__).parents[2] / "constraints.txt"
INDEX = "https://pypi.org/pypi"
CONTROL = ("jinja2", "2.10")  # CVE-2019-10906


@dataclass
class Audit:
    """`asked` pins were found in the index; `unknown` says what could not be asked."""

    pins: int = 0
    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def pins() -> list[tuple[str, str]]:
    lines = [line for line in PINS.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return [(name, version.split("+")[0]) for name, version in (line.split("==") for line in lines)]


def fetch(path: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"{INDEX}/{path}/json", timeout=30) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def vulnerabilities(pin: tuple[str, str]) -> list[str] | None:
    found = fetch("/".join(pin))
    return None if found is None else [entry["id"] for entry in found.get("vulnerabilities") or []]


def withdrawn(pin: tuple[str, str]) -> bool | None:
    """None where the index does not know the release."""
    found = fetch(pin[0])
    release = ((found or {}).get("releases") or {}).get(pin[1])
    return all(file.get("yanked") for file in release) if release else None


def audit() -> Audit:
    known = pins()
    found = Audit(len(known))
    with ThreadPoolExecutor(8) as pool:
        for pin, answer in zip(known, pool.map(withdrawn, known), strict=True):
            found.asked += answer is not None
            if answer:
                found.wrong.append(f"{'=='.join(pin)} was withdrawn by its authors")
        if found.asked < len(known):
            found.unknown.append(f"{len(known) - found.asked} pins are not in the index that can be reached")
        if not vulnerabilities(CONTROL):
            found.unknown.append("known vulnerabilities: the index that can be reached does not have them")
            return found
        for pin, ids in zip(known, pool.map(vulnerabilities, known), strict=True):
            found.wrong += [f"{'=='.join(pin)}: {name}" for name in ids or []]
    return found


def main() -> int:
    found = audit()
    print(json.dumps({"pins": found.pins, "asked": found.asked, "wrong": found.wrong, "unknown": found.unknown}))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
