"""A browser without scripts: keeps cookies, follows no redirect by itself, and sends the forms of its pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from urllib.parse import urlencode, urljoin, urlsplit

from tests.api.running_api import Answer, Api


@dataclass(slots=True)
class FormOnPage:
    action: str
    method: str
    fields: list[tuple[str, str]] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)  # the names of all controls, also of those without a value

    def names(self) -> list[str]:
        return [name for name, _ in self.fields]


class _Forms(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.forms: list[FormOnPage] = []
        self._textarea: str | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.forms.append(FormOnPage(given.get("action", ""), given.get("method", "get")))
        if not self.forms:
            return
        if tag in ("input", "select", "textarea") and "name" in given:
            self.forms[-1].controls.append(given["name"])
        if tag == "textarea":
            self._textarea, self._text = given.get("name"), ""
        elif tag == "input" and "name" in given and given.get("type") not in ("checkbox", "radio", "submit"):
            self.forms[-1].fields.append((given["name"], given.get("value", "")))

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea" and self._textarea:
            self.forms[-1].fields.append((self._textarea, self._text.removeprefix("\n")))
            self._textarea = None


def forms_of(answer: Answer) -> list[FormOnPage]:
    parser = _Forms()
    parser.feed(answer.body.decode())
    return parser.forms


def text_of(page: Answer) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page.body.decode())).split())


def links_of(page: Answer, part: str = "") -> list[str]:
    found = re.findall(r'<a [^>]*href="([^"]*)"', page.body.decode().partition("<main")[2])
    return [link for link in map(unescape, found) if part in link]


def token_of(page: Answer) -> str:
    return next(value for form in forms_of(page) for name, value in form.fields if name == "csrf_token")


@dataclass(slots=True)
class Browser:
    api: Api
    headers: dict[str, str] = field(default_factory=lambda: {"Sec-Fetch-Site": "same-origin"})  # of each request
    cookies: dict[str, str] = field(default_factory=dict)
    strict_cookies: set[str] = field(default_factory=set)  # names of cookies that another site's links do not send
    set_cookies: list[str] = field(default_factory=list)
    page: Answer | None = None  # the last response

    async def get(self, path: str, **headers: str) -> Answer:
        return await self._send("GET", path, None, headers)

    async def post(self, path: str, fields: Mapping[str, str] | list[tuple[str, str]], **headers: str) -> Answer:
        return await self._send("POST", path, urlencode(fields).encode(), headers)

    async def submit(self, target: str, **values: str) -> Answer:
        """Fills in and sends the form of the last page whose action ends with `target`."""
        assert self.page is not None
        form = next(each for each in forms_of(self.page) if each.action.endswith(target))
        kept = [(name, value) for name, value in form.fields if name not in values]
        return await self.post(form.action, [*kept, *values.items()])

    async def follow(self) -> Answer:
        assert self.page is not None
        parts = urlsplit(urljoin("/", self.page.headers["location"]))
        return await self.get(parts.path + (f"?{parts.query}" if parts.query else ""))

    async def sign_in(self, key: str) -> Answer:
        await self.get("/ops/sign-in")
        return await self.submit("/sign-in", key=key)

    async def _send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        sent = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        is_cross_site = sent.get("Sec-Fetch-Site") == "cross-site"
        cookies = [each for each in self.cookies.items() if not (is_cross_site and each[0] in self.strict_cookies)]
        if cookies:
            sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies)
        if body is not None:
            sent.setdefault("Content-Type", "application/x-www-form-urlencoded")
        self.page = await self.api.call(method, path, raw=body, headers=sent)
        for text in self.page.headers.get("set-cookie", "").splitlines():
            self.set_cookies.append(text)
            name, _, value = text.partition(";")[0].partition("=")
            if "samesite=strict" in text.lower():
                self.strict_cookies.add(name)
            if "max-age=0" in text.lower():
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value
        return self.page


async def signed_in(api: Api, key: str) -> Browser:
    browser = Browser(api)
    await browser.sign_in(key)
    return browser
