"""One HTML file that opens anywhere: markup, styles, scripts, plotly and the data, and a policy that allows no more."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from rankwise.errors import need
from rankwise.reports.pack import script_json


def plotly_source() -> str:
    """The library that draws the charts, as text; an error names the extra where it is missing."""
    text: str = need("plotly.offline", extra="report", purpose="a report").get_plotlyjs()
    return text


def make_page(content: dict[str, Any], body: str, names: Sequence[str], plotly: str) -> bytes:
    """The page with everything inside. Its policy: these scripts by their hash, no other, and nothing from anywhere."""
    style = _asset("report.css")
    scripts = [text.replace("\r", "") for text in (plotly, "\n".join(_asset(name) for name in names))]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    title = escape(content["title"])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{_asset(body)}\n"
        f'<script type="application/json" id="data">{script_json(content)}</script>\n'
        + "".join(f"<script>{s}</script>\n" for s in scripts)
        + "</body>\n</html>\n"
    ).encode()


def _asset(name: str) -> str:
    return resources.files("rankwise.reports").joinpath("page", name).read_text(encoding="utf-8")
