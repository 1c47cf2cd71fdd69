"""A tab of the browser that collects what goes wrong in it, and helpers that look at a page as a visitor does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Final, Literal

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect

AXE: Final = files("axe_playwright_python") / "axe.min.js"
NARROW: Final = 320
WIDE: Final = 1280
TIMEOUT_MS: Final = 60_000

expect.set_options(timeout=TIMEOUT_MS)

_OVERFLOWING: Final = """() => {
    const width = document.documentElement.clientWidth;
    if (document.scrollingElement.scrollWidth <= width) return [];
    const scrolls = (element) => {
        for (let outer = element.parentElement; outer && outer !== document.body; outer = outer.parentElement)
            if (getComputedStyle(outer).overflowX !== "visible") return true;
        return false;
    };
    const wide = [...document.body.querySelectorAll("*")].filter(
        (element) => element.getBoundingClientRect().right > width + 1 && !scrolls(element));
    return [`${document.scrollingElement.scrollWidth} px`, ...wide.slice(0, 8).map(
        (element) => element.outerHTML.slice(0, 120))];
}"""
_REFRESH: Final = """() => {
    for (const each of document.querySelectorAll("[data-refresh]")) htmx.trigger(each, "refresh", {}, false);
}"""
_TWO_FRAMES: Final = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
_FOCUSED: Final = """() => {
    const element = document.activeElement;
    return `${element.tagName.toLowerCase()} ${element.id || element.innerText || element.name}`;
}"""
_AXE_RUN: Final = """async (rules) => {
    const options = {resultTypes: ["violations"], preload: false, iframes: false};
    if (rules.length) options.runOnly = {type: "rule", values: rules};
    const {violations} = await axe.run(document, options);
    return violations.filter((each) => ["serious", "critical"].includes(each.impact)).map((each) =>
        `${each.id} (${each.impact}): ${each.help}: ` + each.nodes.slice(0, 5).map(
            (node) => node.html.slice(0, 160) + " " + node.any.map((check) => check.message).join(" ").slice(0, 200)
        ).join(" | "));
}"""


class Tab:
    """A page of its own browser context. `problems` are errors on the console, among them violations of the
    Content-Security-Policy, and uncaught exceptions."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.url = url
        self.problems: list[str] = []
        self._expected: re.Pattern[str] | None = None
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))

    def go(self, path: str) -> Page:
        response = self.page.goto(self.url + path)
        assert response is not None
        assert response.status == 200, f"{path}: {response.status}"
        return self.page

    def sign_in(self, key: str) -> None:
        self.go("/sign-in")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        expect(self.page.get_by_role("button", name="Sign out")).to_be_visible()

    def refresh(self) -> None:
        with self.page.expect_response(lambda response: "hx-request" in response.request.headers):
            self.page.evaluate(_REFRESH)

    def overflowing(self) -> list[str]:
        found: list[str] = self.page.evaluate(_OVERFLOWING)
        return found

    def barriers(self, *rules: str) -> list[str]:
        """What axe-core finds serious or critical on the page, by these rules, or by all if none is given."""
        if not self.page.evaluate("'axe' in window"):
            # Not as a <script>, which the Content-Security-Policy forbids.
            self.page.evaluate(AXE.read_text())
        found: list[str] = self.page.evaluate(_AXE_RUN, list(rules))
        return found

    def show(self, colors: Literal["light", "dark"] = "light", width: int = WIDE) -> None:
        """Changes the colour scheme and the width of the window, and waits until charts are drawn with that width."""
        self.page.emulate_media(color_scheme=colors, reduced_motion="reduce")
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.evaluate(_TWO_FRAMES)

    def expect(self, pattern: str) -> None:
        self._expected = re.compile(pattern)

    def press_until(self, key: str, selector: str, *, most: int = 80) -> None:
        passed: list[str] = []
        for _ in range(most):
            if self.page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
                return
            passed.append(self.page.evaluate(_FOCUSED))
            self.page.keyboard.press(key)
        raise AssertionError(f"{key} does not lead to {selector}, only to {passed}")

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not (self._expected and self._expected.search(message.text)):
            self.problems.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")


class Tabs:
    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url
        self._opened: list[tuple[BrowserContext, Tab]] = []

    def open(self, storage: Any = None) -> Tab:
        context = self._browser.new_context(
            storage_state=storage,
            viewport={"width": WIDE, "height": 900},
            timezone_id="Europe/Berlin",
            locale="en-GB",
        )
        tab = Tab(context, self._url)
        self._opened.append((context, tab))
        return tab

    def close(self) -> Sequence[str]:
        problems = [problem for _, tab in self._opened for problem in tab.problems]
        for context, _ in self._opened:
            context.close()
        return problems
