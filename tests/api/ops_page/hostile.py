"""Texts that try to become markup or to mislead a reader, and a check that a page shows them as text only."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final

from tests.api.running_api import Answer

MARK: Final = "zqx"
"""Each text has this mark, so that a test can show that the page contains it."""
TEXTS: Final = (
    f"<script>{MARK}(1)</script>",
    f"</title></textarea></script><script src=//evil.example/{MARK}></script>",
    f'"><img src=x onerror={MARK}(1)>',
    f"' autofocus onfocus={MARK}(1) x='",
    f"<svg/onload={MARK}(1)>",
    f"javascript:{MARK}(1)//",
    f"{{{{ {MARK} }}}}{{% for x in {MARK} %}}",
    f"<iframe srcdoc='<script>{MARK}(1)</script>'></iframe>",
    f"<a href=data:text/html,{MARK}>click</a><base href=//evil.example><meta http-equiv=refresh content=0>",
    f"</bdi></code></td></table></main><form action=//evil.example><input name={MARK}>",
    f"--><!-- {MARK} <![CDATA[ ]]>",
    f"\u202egpj.{MARK}\u2066 \u2069 \u200f\u061c \u2028 \ufeff \x1b[31m \x07\x7f\x9b",
    f"hx-get=/ops hx-on:click={MARK}(1) <div hx-get=/ops/sign-out hx-trigger=load>{MARK}</div>",
)
SHORT: Final = " ".join(TEXTS)
"""All texts in one, short enough for an index entry."""
LONG: Final = f"<script>{MARK}(1)</script>\u202e" + "<b>x" * 16_384
"""64 kB."""
_MISLEADING: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_OWN: Final = re.compile(r"(?:/ops(?:[/?].*)?|#main)")
_TAGS: Final = frozenset(
    [
        "html",
        "head",
        "meta",
        "title",
        "link",
        "script",
        "body",
        "a",
        "header",
        "div",
        "button",
        "span",
        "form",
        "label",
        "input",
        "nav",
        "ul",
        "ol",
        "li",
        "main",
        "footer",
        "h1",
        "h2",
        "h3",
        "p",
        "section",
        "dl",
        "dt",
        "dd",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "code",
        "bdi",
        "wbr",
        "details",
        "summary",
        "time",
        "strong",
        "pre",
        "datalist",
        "option",
        "select",
        "br",
        "textarea",
    ]
)


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _TAGS:
            self.faults.append(f"element {tag}")
        for name, value in attrs:
            if name.startswith(("on", "hx-on")) or name in ("style", "srcdoc", "http-equiv"):
                self.faults.append(f"attribute {name}")
            if name in ("href", "src", "action", "hx-get") and not _OWN.fullmatch(value or ""):
                self.faults.append(f"{name} {value!r}")
            if MARK in name or (name in ("id", "class") and MARK in (value or "")):
                self.faults.append(f"attribute {name}={value!r}")
        if tag == "script" and not dict(attrs).get("src"):
            self.faults.append("script without source")

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.faults.append(f"comment {data!r}")


def faults_of(page: Answer) -> list[str]:
    """What a hostile text has achieved on a page: elements, attributes, foreign links, characters that mislead."""
    html = page.body.decode()
    checker = _Checker()
    checker.feed(html)
    checker.close()
    shown = checker.text.replace("\r", "")
    return [*checker.faults, *(f"character {ord(found[0]):#x}" for found in _MISLEADING.finditer(shown))]
