"""The page at /: one self-contained document, put together from the files beside this one.

page.html has an empty <style> and an empty <script>, which receive page.css and all of SCRIPTS. The content policy
allows exactly these two by their hashes. It forbids loading anything, requests to other servers, and text assigned as
HTML, because the names of engines, devices and paths come from others.
"""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SCRIPTS = ("words.js", "samples.js", "elements.js", "charts.js", "sections.js", "asking.js")
"""Joined to one script in this order: each file uses names of those before it."""


class Page(NamedTuple):
    body: bytes
    headers: tuple[str, ...]
    """Whole header lines."""


@cache
def page() -> Page:
    """The page, read from its files once. Raises OSError when the installation lacks a file."""
    document, style = ((HERE / name).read_text() for name in ("page.html", "page.css"))
    script = "\n".join((HERE / name).read_text() for name in SCRIPTS)
    document = _filled(document, "<style>", "</style>", style)
    document = _filled(document, '<script type="module">', "</script>", script)
    policy = [
        "default-src 'none'",
        f"script-src {_source(script)}",
        f"style-src {_source(style)}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return Page(document.encode(), (f"Content-Security-Policy: {'; '.join(policy)}", "Referrer-Policy: no-referrer"))


def _filled(document: str, begin: str, end: str, text: str) -> str:
    """The document with `text` between two tags, which must occur once with nothing between them."""
    assert document.count(begin + end) == 1
    assert end not in text
    return document.replace(begin + end, begin + text + end)


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
