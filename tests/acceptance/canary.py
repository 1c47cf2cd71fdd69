"""Canaries are private words in an email that may reach only the provider and the content tables. This module searches
for them, and sends each kind of invalid request, with canaries in the request, to the HTTP API."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import orjson
import psycopg
from psycopg import sql

from dispatcher import Attachment, Email

CANARIES: Final = {
    "recipient": "vykra7recipient",
    "name": "vykraname",
    "sender": "vykrasender",
    "subject": "vykrasubject",
    "text": "vykratext",
    "html": "vykrahtml",
    "file name": "vykrafile",
    "file": "vykrabytes",
    "header": "vykraheader",
    "API key": "vykraapikey",
    "password": "vykrapassword",
    "caller's key": "vykracaller",
}
API_KEY: Final = f"SG.{CANARIES['API key']}01.x2y3"
PASSWORD: Final = CANARIES["password"]
RECIPIENT: Final = f"{CANARIES['recipient']}@example.org"
SUBJECT: Final = f"Your {CANARIES['subject']} is ready"

ECHO: Final = (
    f"<{RECIPIENT}> {CANARIES['recipient']} to {CANARIES['name']}: subject '{SUBJECT}' from {CANARIES['sender']}; "
    f"{CANARIES['header']}; {CANARIES['file name']}.pdf; we read that the {CANARIES['text']} is in it; "
    f"Authorization: Bearer {API_KEY}; key {API_KEY}"
)
"""An answer of a provider that repeats the email's private values."""
LOGIN_ECHO: Final = f"{PASSWORD}: <{RECIPIENT}>; Authorization: Bearer {API_KEY}; key {API_KEY}"
"""An answer to a login. On this connection, the server has seen no part of an email yet."""

_CONTENT_TABLES: Final = ("email_content", "email_attachment")


def email(key: str) -> Email:
    return Email(
        message_key=key,
        correlation_id=f"order-{key}",
        sender=f"Shop <{CANARIES['sender']}@example.com>",
        to=f"Ann {CANARIES['name']} <{RECIPIENT}>",
        bcc=f"bcc.{RECIPIENT}",
        reply_to=f"reply.{CANARIES['sender']}@example.com",
        subject=SUBJECT,
        text=f"Dear customer,\nwe read that the {CANARIES['text']} is in it.",
        html=f"<p>Dear customer, the <b>{CANARIES['html']}</b> is in it.</p>",
        headers={"X-Case": CANARIES["header"]},
        attachments=[Attachment(f"{CANARIES['file name']}.pdf", "application/pdf", CANARIES["file"].encode())],
    )


def found_in(places: Mapping[str, bytes | str]) -> list[str]:
    """The canaries in each text, as plain text or as base64, with the characters around them."""
    octets = {place: (text.encode() if isinstance(text, str) else text).lower() for place, text in places.items()}
    return [
        f"{name} in {place}: …{content[max(0, content.index(form) - 60) : content.index(form) + 40]!r}…"
        for place, content in octets.items()
        for name, canary in CANARIES.items()
        for form in _forms(canary)
        if form in content
    ]


def _forms(canary: str) -> Iterator[bytes]:
    yield canary.encode()
    for shift in range(3):
        # In a longer text, the first and last base64 characters of a word depend on the bytes before and after it.
        yield base64.b64encode(b"." * shift + canary.encode())[2 * (shift > 0) + shift : -4].lower()


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tables(database_url: str, *, of_content: bool) -> dict[str, str]:
    """All rows as text, by table: the tables with emails' content, or all other tables."""
    listed = "select relname from pg_class where relkind in ('r', 'p') and relnamespace = 'dispatcher'::regnamespace"
    with psycopg.connect(database_url, autocommit=True) as connection:
        names = [name for (name,) in connection.execute(listed)]
        return {
            f"table {name}": _rows(connection, name)
            for name in names
            if any(name.startswith(table) for table in _CONTENT_TABLES) is of_content
        }


def _rows(connection: psycopg.Connection, table: str) -> str:
    statement = sql.SQL("select each::text from {} as each").format(sql.Identifier(table))
    return "\n".join(row for (row,) in connection.execute(statement))


NAME: Final = CANARIES["name"]
GOOD: Final[dict[str, Any]] = {"from": RECIPIENT, "to": RECIPIENT, "subject": SUBJECT, "text": CANARIES["text"]}
_PROGRAM: Final = {"filename": f"{CANARIES['file name']}.exe", "content_type": "x/y", "content": CANARIES["file"]}
_BAD: Final[tuple[Any, ...]] = (
    [RECIPIENT],
    {**GOOD, "to": f"{RECIPIENT}@twice"},
    {**GOOD, "subject": f"{SUBJECT}\nBcc: {RECIPIENT}"},
    {**GOOD, "subject": 1},
    {**GOOD, "tenant_id": NAME + "\n"},
    {**GOOD, "on_uncertain": NAME},
    {**GOOD, "headers": {"Bcc": RECIPIENT}},
    {**GOOD, "headers": {"X-Case": f"{CANARIES['header']}\r\n{NAME}"}},
    {**GOOD, "attachments": [_PROGRAM]},
)
BAD_BODIES: Final = (orjson.dumps(GOOD)[:-1], *map(orjson.dumps, _BAD))
_PATHS: Final = (
    f"/v1/emails/{NAME}",
    f"/v1/emails/by-key/{NAME}",
    "/v1/emails/by-key/one",
    f"/v1/emails?limit={NAME}",
    "/v1/emails",
    f"/{NAME}",
    "/openapi.json",
    "/healthz",
)


def request(listener: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection(listener, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, {"Content-Type": "application/json", **named})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, f"{answer.status} {answer.headers}\n".encode() + body


def ask_everything(listener: str) -> bytes:
    good, other = orjson.dumps(GOOD), orjson.dumps({**GOOD, "subject": NAME})
    batch = orjson.dumps({"emails": [*_BAD]})
    answers = [
        *(request(listener, "POST", "/v1/emails", body, Idempotency_Key="bad") for body in BAD_BODIES),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key="one"),
        request(listener, "POST", "/v1/emails", other, Idempotency_Key="one"),
        request(listener, "POST", "/v1/emails/batch", batch),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key="two", Authorization=CANARIES["caller's key"]),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key="two", Content_Type=f"text/{NAME}"),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key="two", Host=f"{NAME}.example.com"),
        request(listener, "POST", "/v1/emails", good, Idempotency_Key=f"é {NAME}"),
        request(listener, "POST", "/v1/emails", good),
        request(listener, "DELETE", f"/v1/emails/by-key/{NAME}"),
        *(request(listener, "GET", path) for path in _PATHS),
    ]
    assert {status for status, _ in answers} >= {200, 202, 400, 403, 404, 405, 415, 422}, {
        status for status, _ in answers
    }
    return b"\n".join(words for _, words in answers)
