"""`rankwise …` and `python -m rankwise …`: one sentence and exit status 2 for whatever a user got wrong."""

from __future__ import annotations

import sys

import typer

from rankwise.cli.commands import COMMANDS, app_for
from rankwise.cli.wording import in_flags, printable
from rankwise.errors import Interrupted, RankwiseError, out_of_memory
from rankwise.version import __version__

# What a wrong flag raises. Some versions of typer carry a click of their own, so ask typer for the class.
USAGE: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _outside(err: Exception) -> str | None:
    """What the machine did not give: a disk that fails, or memory. None for our own mistakes."""
    if isinstance(err, OSError):
        what = f"{err.filename}: " if err.filename else ""
        return f"{what}{err.strerror or err}: check the disk and the space left, then run the same command again"
    # A library that cannot be loaded, and an import for which Python finds no memory.
    signs = ("failed to map segment", "error return without exception set")
    if out_of_memory(err) or any(sign in str(err) for sign in signs):
        return "there is not enough memory: use a smaller batch, fewer calibration inputs, or a larger machine"
    return None


def filled_in(given: list[str]) -> list[str]:
    """A flag whose value may be left out, with the value that it then has.

    >>> filled_in(["compress", "resnet20", "--calibrate", "--keep", "0.5"])
    ['compress', 'resnet20', '--calibrate', 'auto', '--keep', '0.5']
    """
    found: list[str] = []
    for i, word in enumerate(given):
        found.append(word)
        if word == "--calibrate" and (i + 1 == len(given) or given[i + 1].startswith("-")):
            found.append("auto")
    return found


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--version"]:
        print(f"rankwise {__version__}")
        return 0
    try:
        if given and not given[0].startswith("-") and given[0] not in COMMANDS:
            raise RankwiseError(f"there is no command {given[0]!r}: the commands are {', '.join(COMMANDS)}")
        given = filled_in(given)
        app = app_for([name for name in given[:1] if name in COMMANDS])
        result = typer.main.get_command(app).main(given or ["--help"], prog_name="rankwise", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (RankwiseError, USAGE) as err:
        sentence = str(err)
        if hasattr(err, "format_message"):  # a flag that is wrong or missing
            sentence = f"{err.format_message().rstrip('.')}; see rankwise {' '.join(given[:1])} --help"
        print(f"rankwise: {in_flags(sentence)}", file=sys.stderr)
        return 2
    except (OSError, MemoryError, RuntimeError, ImportError, SystemError) as err:
        told = _outside(err)
        if told is None:
            raise
        print(f"rankwise: {printable(' '.join(told.split()))}", file=sys.stderr)
        return 1
    except (typer.Abort, KeyboardInterrupt, Interrupted) as err:
        print(f"rankwise: {printable(str(err) or 'interrupted')}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
