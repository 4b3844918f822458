"""Writers through all their crash states: `explore` gives how many there were and what was wrong."""

from __future__ import annotations

import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from trust.crash import recording, states
from trust.writers import Violation, Writer

SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Found:
    """One line of the table that `make trust` prints."""

    name: str
    states: int = 0
    failures: int = 0
    inputs: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


def explore(writer: Writer, most: int = 1 << 9, stride: int = 1, every: int = 0, enough: int = 1 << 30) -> Found:
    """Every state of the writer, at most `most` after one operation, after every `stride`-th operation.

    After every `every`-th state the work goes on. After `enough` violations the search ends.
    """
    found, start = Found(writer.name), time.process_time()
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        root = Path(name) / "at" / "disk"
        root.mkdir(parents=True)
        writer.prepare(root)
        with recording(root) as note:
            writer.write(root, note)
        crashed = Path(name) / "at" / "crashed"
        crashed.mkdir()
        held: dict[str, bytes | None] = {}
        for state in states(note, most, stride=stride):
            if len(found.violations) >= enough:
                break
            held = state.lay_out(crashed, held)
            found.states += 1
            try:
                writer.check(crashed, state)
                if every and writer.go_on is not None and found.states % every == 1:
                    writer.go_on(crashed)
                    held = contents(crashed)
            except Violation as err:
                found.violations.append(f"after operation {state.at} of {len(note.ops)}: {err}")
            except Exception as err:
                last = traceback.extract_tb(err.__traceback__)[-1]
                found.violations.append(
                    f"after operation {state.at}: {type(err).__name__}: {err} ({last.filename}:{last.lineno})"
                )
        found.notes["operations"] = len(note.ops)
    found.seconds = time.process_time() - start
    return found


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}
