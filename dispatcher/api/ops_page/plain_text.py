"""Shows texts from outside, such as a provider's answer. Markup and control characters in them have no effect."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

from markupsafe import Markup

SHORT_CHARACTERS: Final = 160
"""The most characters of a text that are shown at once. The visitor can open the whole text."""
MAX_CHARACTERS: Final = 200_000
"""The most characters of a text on a page, so that an email of 10 MB does not stop the browser."""

# Matches control characters except tab and line feed, marks that change the reading direction or are invisible,
# separators at which browsers break lines, and lone surrogates, which UTF-8 cannot encode. Does not match joiners:
# some scripts and emoji need them.
_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_LONG_WORD: Final = re.compile(r"\S{80}(?=\S)")
_SHORT: Final = Markup("<bdi>{}</bdi>")
_LONG: Final = Markup(
    '<details class="long"><summary><bdi>{}…</bdi> <span class="more">{:,} characters</span></summary>'
    '<bdi class="whole">{}</bdi></details>'
)


def visible(text: str) -> str:
    """The text with an escape, such as \\u202e, in place of each character that would be invisible or misleading."""
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def cut(text: str, at_most: int = MAX_CHARACTERS) -> str:
    """The beginning of a text, as `visible` returns it.

    If the text is longer than `at_most`, a note at the end says how many characters are left out.
    """
    shown = visible(text[:at_most])
    return shown if len(text) <= at_most else f"{shown}… ({len(text) - at_most:,} characters more)"


def breakable(text: str) -> Markup:
    """The HTML of a text, with a possible line break after each 80 characters of a long word.

    Otherwise, a word of 64,000 characters would stop some browsers for half a minute, even if it is hidden.
    """
    ends = [found.end() for found in _LONG_WORD.finditer(text)]
    return Markup("<wbr>").join(text[begin:end] for begin, end in pairwise([0, *ends, len(text)]))


def whole(text: str) -> Markup:
    """The HTML of a long text: `cut` and `breakable`."""
    return breakable(cut(text))


def plain(value: object, at_most: int = SHORT_CHARACTERS, *, opens: bool = True) -> Markup:
    """The HTML of a text, shortened to `at_most` characters. Its reading direction does not affect the text around it.

    If `opens`, the visitor can open the whole text with a `<details>` element, which links and headings cannot contain.
    """
    text = str(value)
    if len(text) <= at_most:
        return _SHORT.format(visible(text))
    if not opens:
        return _SHORT.format(f"{visible(text[:at_most])}…")
    return _LONG.format(visible(text[:at_most]), len(text), whole(text))
