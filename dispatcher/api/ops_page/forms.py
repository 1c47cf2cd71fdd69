"""Reads the bodies of forms, and keeps forms that arrive after their session has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

from starlette.requests import Request

from dispatcher.api.ops_page.page_errors import PageError

MAX_FORM_BYTES: Final = 256 * 1024
MAX_FIELDS: Final = 1000
CSRF_FIELD: Final = "csrf_token"
KEPT_PREFIX: Final = "kept."
KEPT_PATH: Final = "kept_path"
KEPT_TITLE: Final = "kept_title"


class Form(Mapping[str, str]):
    """The fields of a form. If a field occurs several times, `form[name]` is its last value."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = tuple(pairs)
        self._last = dict(pairs)

    def __getitem__(self, name: str) -> str:
        return self._last[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def without_internals(self) -> Form:
        """The form without its CSRF token."""
        return Form([pair for pair in self.pairs if pair[0] != CSRF_FIELD])

    def kept(self, path: str, title: str) -> KeptForm:
        """This form as a `KeptForm`, which the visitor can send again."""
        return KeptForm(path, title, self.without_internals().pairs)

    def kept_before(self) -> KeptForm | None:
        """The form that the sign-in page has kept in hidden fields; None if it has kept none."""
        if not (path := self.get(KEPT_PATH)):
            return None
        pairs = [(name.removeprefix(KEPT_PREFIX), value) for name, value in self.pairs if name.startswith(KEPT_PREFIX)]
        return KeptForm(path, self.get(KEPT_TITLE, ""), tuple(pairs))


@dataclass(frozen=True, slots=True)
class KeptForm:
    """A form that was not processed, usually because the session had ended. The visitor checks it, and sends it again.

    `path` is its target below `site.path`, `title` says what it does.
    """

    path: str
    title: str
    pairs: Sequence[tuple[str, str]]


async def read_form(request: Request) -> Form:
    """The form in a request's body. Later calls for the same request return the same form."""
    if (known := getattr(request.state, "form", None)) is not None:
        found: Form = known
        return found
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/x-www-form-urlencoded":
        raise PageError(400, "The request has no form.", "Use the forms on these pages.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise PageError(413, f"The form has more than {MAX_FORM_BYTES:,} bytes.", "Send less text.")
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, encoding="utf-8", errors="strict"
        )
    except ValueError:  # too many fields, or not UTF-8
        raise PageError(400, "The form could not be read.", "Use the forms on these pages.") from None
    # Browsers send the line ends of a text area as CR LF. Change them to LF.
    form = Form([(name, value.replace("\r\n", "\n").replace("\0", "")) for name, value in pairs])
    request.state.form = form
    return form
