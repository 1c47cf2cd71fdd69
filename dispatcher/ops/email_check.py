"""Checks an email's HTML: what common mail clients do not support, and links that lead nowhere or mislead. Requests
nothing from the network, so it does not know whether a link's page exists.

The tables are a short list of what breaks most often, and not a test in mail clients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

MAX_CHARACTERS: Final = 256 * 1024
MAX_FOUND: Final = 200
CLIPPED_BYTES: Final = 102 * 1024
TAGS: Final = {
    "script": "No mail client runs scripts.",
    "form": "Outlook for Windows and for Mac shows no forms: link to a page instead.",
    "svg": "Gmail, Outlook and Yahoo do not show embedded SVG: use a PNG image.",
    "video": "Gmail, Outlook for Windows and Yahoo do not play videos: link to a page with the video.",
    "iframe": "Mail clients remove frames.",
    "link": "Gmail, Outlook.com and Yahoo ignore linked style sheets: use a <style> in the <head>.",
}
STYLES: Final = tuple(
    (name, re.compile(pattern, re.IGNORECASE), why)
    for name, pattern, why in (
        ("display: flex", r"display\s*:\s*(inline-)?flex", "Outlook for Windows and GMX do not support it."),
        ("display: grid", r"display\s*:\s*(inline-)?grid", "Gmail, Outlook for Windows and Yahoo do not support it."),
        ("position", r"(?<![\w-])position\s*:\s*(abs|fix|rel|stic)", "Gmail and Outlook for Windows ignore it."),
        ("background image", r"background(-image)?\s*:[^;}]{0,500}?url\(", "Outlook for Windows shows none."),
        ("var()", r"var\(\s*--", "Gmail, Outlook and Yahoo do not support CSS variables."),
        ("@import", r"@import", "Gmail, Outlook.com and Yahoo ignore it."),
        ("@font-face", r"@font-face", "Gmail, Outlook and Yahoo load no fonts: name a system font, too."),
    )
)  # fmt: skip
_NOT_IN_URL: Final = re.compile(r"[\s<>{}|\\^`\"\x00-\x1f]")
_URL: Final = re.compile(r"https?://[^\s<>\"']{1,2000}", re.IGNORECASE)
_AFTER_URL: Final = ".,;:!?)]}"
_NAMES_HOST: Final = re.compile(r"(?:https?://)?((?:[\w-]{1,63}\.){1,10}[a-z]{2,24})(?:[:/?#]\S*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What mail clients do not support. `line` is the line of the HTML; None if the finding is about the whole."""

    line: int | None
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class Link:
    """A link. `line` is the line of the HTML, or None if the link is in the text. `problems` are predicates."""

    url: str
    text: str
    line: int | None
    problems: tuple[str, ...]


class Checked(NamedTuple):
    """At most about 200 findings and 200 links of the HTML, and 200 links of the text."""

    findings: list[Finding]
    links: list[Link]


def check(html: str | None, text: str | None) -> Checked:
    """What is found in an email's HTML and text. Of each, only the first 256 Ki characters are checked."""
    checked = Checked([], [])
    if html is not None:
        checker = _Checker(checked)
        try:
            checker.feed(html[:MAX_CHARACTERS])
        except AssertionError:  # the parser's only exception
            checker.find("markup", "The rest of the HTML is not valid, and was not checked.")
        checker.end_link()
        whole = []
        if (size := len(html.encode())) > CLIPPED_BYTES:
            whole.append(("size", f"Gmail hides what follows 102 KB of HTML. This has {size // 1024} KB."))
        if not (text or "").strip():
            whole.append(("text part", "There is none. Some clients and spam filters expect it."))
        checked.findings.extend(Finding(None, *each) for each in whole)
    found = _URL.findall((text or "")[:MAX_CHARACTERS])[:MAX_FOUND]
    for url in dict.fromkeys(each.rstrip(_AFTER_URL) for each in found):
        checked.links.append(Link(url, "", None, tuple(_problems(url, ""))))
    return checked


class _Checker(HTMLParser):
    def __init__(self, checked: Checked) -> None:
        super().__init__(convert_charrefs=True)
        self._checked = checked
        self._is_in_body = self._is_in_style = False
        self._link: tuple[str, int] | None = None  # its URL and line, until its end tag
        self._texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in reversed(attrs)}  # of repeated attributes, the first counts
        self._check_style(given.get("style", ""))
        if tag in TAGS and (tag != "link" or "stylesheet" in given.get("rel", "").lower()):
            self.find(f"<{tag}>", TAGS[tag])
        elif tag == "style":
            self._is_in_style = True
            if self._is_in_body:
                self.find("<style> in the <body>", "Gmail and Outlook for Windows ignore it: move it into the <head>.")
        elif tag == "img":
            self._check_image(given)
        elif tag == "a" and "href" in given:
            self.end_link()
            self._link = given["href"].strip(), self.getpos()[0]
        self._is_in_body |= tag not in ("html", "head", "title", "meta", "style", "link", "base", "script")

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self.end_link()
        elif tag == "style":
            self._is_in_style = False

    def handle_data(self, data: str) -> None:
        if self._is_in_style:
            self._check_style(data)
        elif self._link is not None:
            self._texts.append(data)

    def end_link(self) -> None:
        if self._link is not None:
            text = " ".join("".join(self._texts).split())
            if len(self._checked.links) < MAX_FOUND:
                self._checked.links.append(
                    Link(self._link[0], text, self._link[1], tuple(_problems(self._link[0], text)))
                )
            self._link, self._texts = None, []

    def find(self, subject: str, detail: str, lines_below: int = 0) -> None:
        if len(self._checked.findings) < MAX_FOUND:
            self._checked.findings.append(Finding(self.getpos()[0] + lines_below, subject, detail))

    def _check_style(self, css: str) -> None:
        for name, pattern, why in STYLES:
            for found in pattern.finditer(css):
                self.find(name, why, css.count("\n", 0, found.start()) if self._is_in_style else 0)

    def _check_image(self, given: dict[str, str]) -> None:
        source = given.get("src", "").strip().lower()
        if "alt" not in given:
            self.find("<img> without alt", "Many clients show no images at first, and then the alt text instead.")
        if source.startswith("data:"):
            self.find(
                "<img> with data:", "Outlook for Windows and some webmails do not show it: attach the image (cid:)."
            )
        elif not source.startswith(("http://", "https://", "cid:")):
            self.find("<img> without a URL", "Its src leads nowhere in an email: use https:// or cid:.")
        elif source.partition("?")[0].endswith(".svg"):
            self.find("<img> with SVG", "Gmail and Outlook for Windows do not show SVG: use a PNG image.")


def _problems(url: str, text: str) -> Iterator[str]:
    if url in ("", "#"):
        yield "is empty"
        return
    if _NOT_IN_URL.search(url):
        yield "has a character that a URL cannot have, such as a space or an unfilled placeholder"
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        yield "is malformed"
        return
    if parts.scheme in ("http", "https"):
        yield from _web_problems(parts, host, text)
    elif not parts.scheme:
        if not url.startswith("#"):
            yield "has no scheme, so it leads nowhere in an email"
    elif parts.scheme not in ("mailto", "tel", "sms"):
        yield f"has the scheme {parts.scheme[:20]}, which mail clients may block"


def _web_problems(parts: SplitResult, host: str, text: str) -> Iterator[str]:
    if not host:
        yield "has no host"
        return
    if parts.scheme == "http":
        yield "uses http, not https"
    if _is_local(host):
        yield "leads to this machine or a private network"
    named = _NAMES_HOST.fullmatch(text)
    if named and not f".{host}".endswith(f".{named[1].lower().removeprefix('www.')}"):
        yield f"leads to {host}, but its text names {named[1]}"


def _is_local(host: str) -> bool:
    try:
        return not ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".local", ".internal", ".test"))
