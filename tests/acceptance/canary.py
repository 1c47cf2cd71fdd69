"""Canaries are private words in an email that may reach only the provider and the content tables. This module searches
for them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

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
"""The private words by the field that contains them."""
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
    """An email whose private values are all canaries."""
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
    """The content of every file below a folder, by path."""
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
