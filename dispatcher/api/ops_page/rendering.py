"""Renders the templates, whose values are all escaped, and serves the static files."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from dispatcher.actions.action import cell, label, path_of
from dispatcher.api.ops_page.fields import page_name
from dispatcher.api.ops_page.forms import CSRF_FIELD
from dispatcher.api.ops_page.plain_text import breakable, plain, visible, whole
from dispatcher.api.ops_page.zones import in_zone, zone_of
from dispatcher.domain.email_history import EmailRow
from dispatcher.domain.event import Delivery
from dispatcher.domain.listed_email import ListedEmail
from dispatcher.ops.email_history import DOUBTS
from dispatcher.version import VERSION

REFRESH_SECONDS: Final = 5
NONE: Final = "\N{EN DASH}"
"""What is shown in place of nothing."""
_TIME: Final = Markup('<time datetime="{}" title="{}"{}>{}</time>')
_COPY: Final = Markup(
    '<span class="copyable"><code>{}</code>'
    '<button type="button" class="copy" data-copy="{}" aria-label="Copy {}" title="Copy"></button></span>'
)
_CSRF: Final = Markup('<input type="hidden" name="{}" value="{}">')
_REFRESH: Final = Markup(
    'id="{0}" data-refresh hx-get="{1}" hx-trigger="every {2}s, refresh" hx-select="#{0}" hx-target="this" '
    'hx-swap="outerMorph" hx-select-oob="#paused-band:outerMorph,#failure-count:outerMorph" hx-sync="this:drop"'
)
_ACTOR: Final = re.compile(r"(?:api key|openid) \S+ \((.+)\)")
_SPAN: Final = Markup('<span title="{}">{}</span>')
_BADGE: Final = Markup('<span class="{}">{}</span>')
_DELIVERY_TONES: Final = {Delivery.DELAYED: "warn", Delivery.UNSUBSCRIBED: "quiet"}
_TYPES: Final = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Rendering:
    """The templates for pages whose paths begin with `path`, with the functions and filters that they use."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._environment = Environment(
            loader=PackageLoader("dispatcher.api.ops_page"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.filters.update(plain=plain, visible=visible, breakable=breakable, whole=whole)
        self._environment.globals.update(
            url=self.url,
            static=lambda name: path + static_files()[name].path,
            version=VERSION,
            doubts=DOUBTS,
            label=label,
            cell=lambda *of: NONE if (text := cell(*of)) == "-" else text,
            path_of=path_of,
            page_name=page_name,
        )
        self._environment.filters.update(
            time=time,
            age=age,
            actor=actor,
            offset=offset,
            number=number,
            copy=lambda value: _COPY.format(value, value, value),
            duration=duration,
            bytes=byte_count,
            label=label,
            state=state,
        )

    def render(self, template: str, *, request: Request, csrf_token: str | None, **values: Any) -> str:
        def refresh(name: str) -> Markup:
            if request.method != "GET":
                # The answer to a form must not refresh itself: a refresh would send the form again.
                return Markup('id="{}"').format(name)
            query = f"?{request.url.query}" if request.url.query else ""
            below: str = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
            return _REFRESH.format(name, self._path + below + query, REFRESH_SECONDS)

        csrf = Markup() if csrf_token is None else _CSRF.format(CSRF_FIELD, csrf_token)
        values |= {"csrf": csrf, "refresh": refresh, "rendered_at": datetime.now(UTC), "zone": zone_of(request)}
        return self._environment.get_template(template).render(values)

    def url(self, path: str, **parameters: object) -> str:
        """A link to a path below the prefix of all pages. Leaves out parameters that are None or empty."""
        given = [(page_name(name), value) for name, value in parameters.items() if value is not None and value != ""]
        return self._path + path + (f"?{urlencode(given, doseq=True)}" if given else "")


rendering: Final = cache(Rendering)
"""The templates for pages below a path. Cached, because compiling a template takes tens of milliseconds."""


@pass_context
def time(context: Context, at: datetime | None) -> Markup | str:
    """The HTML of an instant, in the visitor's zone. The title has it in UTC, too."""
    return NONE if at is None else _instant(at, context["zone"])


@pass_context
def age(context: Context, at: datetime | None) -> Markup | str:
    """How long ago an instant was, such as `3 min ago`, or how far in the future it is, such as `in 2 h`."""
    if at is None:
        return NONE
    seconds = (datetime.now(UTC) - at).total_seconds()
    length = duration(abs(seconds), parts=1)
    text = "now" if abs(seconds) < 1 else f"{length} ago" if seconds > 0 else f"in {length}"
    return _instant(at, context["zone"], text)


def _instant(at: datetime, zone: tzinfo, text: str = "", *, is_age: bool = True) -> Markup:
    utc, own = at.astimezone(UTC), f"{in_zone(at, zone):%Y-%m-%d %H:%M:%S}"
    title = f"{utc:%Y-%m-%d %H:%M:%S} UTC" if zone is UTC else f"{own} ({utc:%Y-%m-%d %H:%M:%S} UTC)"
    return _TIME.format(
        f"{utc:%Y-%m-%dT%H:%M:%S.%f}Z", title, Markup(" data-age") if text and is_age else "", text or own
    )


@pass_context
def offset(context: Context, at: datetime, first: datetime) -> Markup:
    """How long after an earlier instant an instant was, such as `+41 ms`; the instant itself, if they are the same."""
    seconds = (at - first).total_seconds()
    return _instant(at, context["zone"], f"+{duration(seconds)}" if seconds > 0 else "", is_age=False)


def actor(name: str) -> Markup:
    """Who acted: the name of a key's or an account's owner, with the whole actor in the title."""
    found = _ACTOR.fullmatch(name)
    return (
        _SPAN.format(visible(name[:200]), plain(found[1], 60, opens=False)) if found else plain(name, 120, opens=False)
    )


def state(email: ListedEmail | EmailRow, size: str = "") -> Markup:
    """The badges of an email: its status, and what became of it. No email that failed to arrive has a good one."""
    delivery = email.delivery
    status = "quiet" if delivery is not None and delivery.has_failed else email.status.value
    badges = [(status, email.status.value)]
    if delivery is not None:
        badges.append(("bad" if delivery.has_failed else _DELIVERY_TONES.get(delivery, "good"), delivery.words))
    return Markup(" ").join(_BADGE.format(f"badge {size} {tone}".replace("  ", " "), words) for tone, words in badges)


def duration(value: float | timedelta | None, parts: int = 2) -> str:
    """A number of seconds in its largest units, such as `3 min 20 s`."""
    if value is None:
        return NONE
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds > 0 else "0 s"
    left, found = round(seconds), list[str]()
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        if count:
            found.append(f"{count} {unit}")
        elif found:
            break
        if len(found) == parts:
            break
    return " ".join(found)


def number(value: float | None) -> str:
    """A number with separators, such as 1,234,567."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def byte_count(value: int | None) -> str:
    """A size, such as `64 kB`."""
    if value is None:
        return NONE
    size, unit = float(value), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:,.0f} {unit}" if unit == "B" or size >= 10 else f"{size:,.1f} {unit}"


class StaticFile(NamedTuple):
    path: str  # below `site.path`; changes when the content changes, so browsers may keep the file for ever
    content: bytes
    media_type: str


@cache
def static_files() -> dict[str, StaticFile]:
    """The style sheets, scripts and icons in the folder `static`, by name. Leaves out other files, such as licences."""
    found = {}
    for resource in files("dispatcher.api.ops_page").joinpath("static").iterdir():
        media_type = _TYPES.get(resource.name.rpartition(".")[2])
        if media_type is not None:
            content = resource.read_bytes()
            digest = sha256(content).hexdigest()[:16]
            found[resource.name] = StaticFile(f"/static/{digest}/{resource.name}", content, media_type)
    return found


async def serve_static(request: Request) -> Response:
    found = static_files().get(request.path_params["name"])
    if found is None or request.path_params["digest"] != found.path.split("/")[2]:
        return Response(status_code=404, headers={"Cache-Control": "no-store"})
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(found.content, headers=headers, media_type=found.media_type)
