"""Checks every link of the built site: `python docs/site/links.py site`.

A link inside the site must lead to a file, and its fragment to an element there. Other addresses are checked by their
form only, so that this runs without a network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page and the addresses that it names."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.ids.add(value)
            if key in ("href", "src") and value is not None:
                self.links.append(value)


def broken(root: Path) -> list[str]:
    """A sentence for each link that leads nowhere."""
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    if not pages:
        return [f"{root} has no pages: build the site first"]
    found = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its addresses are those of the server that shows it
        for link in page.links:
            why = _why(link, path, root, pages)
            if why:
                found.append(f"{path.relative_to(root)}: {link!r} {why}")
    return found


def _why(link: str, path: Path, root: Path, pages: dict[Path, Page]) -> str:
    parts = urlsplit(link)
    if parts.scheme in ("mailto", "data", "javascript"):
        return ""
    if parts.scheme or parts.netloc:
        fine = parts.scheme in ("http", "https") and "." in parts.netloc and " " not in link
        return "" if fine else "is no address of the web"
    target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target = target / "index.html"
    if not target.is_relative_to(root.resolve()):
        return "leads out of the site"
    if not target.exists():
        return "leads to no file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "has a fragment that the page does not have"
    return ""


if __name__ == "__main__":
    sentences = broken(Path(sys.argv[1]).resolve())
    print("\n".join(sentences) or "every link leads somewhere")
    sys.exit(bool(sentences))
