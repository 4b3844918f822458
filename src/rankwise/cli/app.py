"""The command line: thin functions around the library, a table for people or --json for machines."""

from __future__ import annotations

from rankwise.cli.commands import COMMANDS, app_for

app = app_for(list(COMMANDS))
