"""The list of pages. A new page gets one line here, and is then covered by the tests of every page."""

from __future__ import annotations

from typing import Final

PAGES: Final = (
    "/",
    "/emails",
    "/emails?status=failed",
    "/emails/{failed}",
    "/emails/{failed}/replay",
    "/emails/{held}",
    "/emails/{held}/confirm",
    "/emails/{sent}",
    "/emails/{sent}/reveal",
    "/emails/{hostile}",
    "/dead-letters",
    "/held",
    "/poison",
    "/replays",
    "/replays/new",
    "/suppressions",
    "/events",
    "/webhooks",
    "/lanes",
    "/pauses",
    "/keys",
    "/audit",
    "/captured",
    "/captured/{captured}",
    "/captured/{captured}?view=source",
    "/captured/{captured_hostile}?view=html",
)
"""Paths below the operators' page. A name in braces is a key of the ids of `tests.browser.dataset`."""
