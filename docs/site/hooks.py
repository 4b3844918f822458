"""Formulas become MathML while the site is built, so that pages need no script and no network to show them."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    def written(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        return str(convert(unescape(found[2]).strip(), display=display))

    return _FORMULA.sub(written, html)
