"""Each email in a bulk call has the same content as if it was sent alone, and no content of another email."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.domain.outgoing import Attachment, OutgoingEmail
from dispatcher.providers.contract import BulkEntry
from dispatcher.providers.sendgrid import request as sendgrid_request
from dispatcher.providers.sendgrid.request import body_of
from dispatcher.providers.ses import request as ses_request
from dispatcher.providers.ses.request import request_for
from tests.providers.emails import an_email

Document = dict[str, Any]

PEOPLE = ("ann@example.com", "Bob <bob@example.com>", '"Doe, Cleo" <cleo@example.com>', "Dän <dan@bücher.example>")
UNKNOWN_TO_IDNA = "sales@a\u05d01.example"
FILE = Attachment("a.txt", "text/plain", b"hers alone")


def several(values: Sequence[str], least: int = 0) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(values), min_size=least, max_size=2, unique=True).map(tuple)


ANY_EMAIL = st.builds(
    an_email,
    email_id=st.uuids(),
    sender=st.sampled_from(["Shop <shop@example.org>", "shop@example.org", "Other <shop@example.org>"]),
    to=several(PEOPLE),
    cc=several(PEOPLE),
    bcc=several(PEOPLE, least=1),
    reply_to=several(["help@example.org", "Help <help@example.org>", UNKNOWN_TO_IDNA]),
    subject=st.sampled_from(["", "Yours", "Hers"]),
    template_id=st.sampled_from(["d-1", "d-2", None]),
    template_data=st.sampled_from([{}, {"code": "1"}, {"code": "2", "name": "Ann"}]),
    text=st.sampled_from([None, "Hers alone."]),
    html=st.sampled_from([None, "<p>Hers alone.</p>"]),
    headers=st.sampled_from([{}, {"X-Order": "1"}, {"X-Order": "2", "List-Unsubscribe": "<https://example.org/2>"}]),
    tags=several(["receipt", "welcome", "ä"]),
    attachments=st.sampled_from([(), (), (FILE,)]),
)
SOME_EMAILS = st.lists(ANY_EMAIL, min_size=2, max_size=12, unique_by=lambda email: email.email_id)


@given(SOME_EMAILS, st.booleans())
@settings(max_examples=40)
def test_sendgrids(emails: list[OutgoingEmail], sandbox: bool) -> None:
    for together, parts in _groups((email, sendgrid_request.bulk_entry_of(email, sandbox=sandbox)) for email in emails):
        document = orjson.loads(sendgrid_request.bulk_body_of(parts))
        assert _taken_out(document) == {
            email.email_id: orjson.loads(bytes(body_of(email, sandbox=sandbox))) for email in together
        }


def _taken_out(document: Document) -> dict[UUID, Document]:
    people = document.pop("personalizations")
    alone: dict[UUID, Document] = {}
    for one in people:
        own = {name: one.pop(name) for name in ("headers", "subject") if name in one}
        owner = UUID(one["custom_args"]["email_id"])
        alone.setdefault(owner, {**document, **own, "personalizations": []})["personalizations"].append(one)
    return alone


@given(SOME_EMAILS)
@settings(max_examples=40)
def test_ses(emails: list[OutgoingEmail]) -> None:
    for together, parts in _groups((email, ses_request.bulk_entry_of(email)) for email in emails):
        request = orjson.loads(bytes(ses_request.bulk_request_for(parts, "set").body))
        alone = [_alone(request, entry) for entry in request["BulkEmailEntries"]]
        assert alone == [orjson.loads(bytes(request_for(email, "set").body)) for email in together]


def _alone(request: Document, entry: Document) -> Document:
    template = {
        "TemplateName": request["DefaultContent"]["Template"]["TemplateName"],
        "TemplateData": entry["ReplacementEmailContent"]["ReplacementTemplate"]["ReplacementTemplateData"],
    }
    if "ReplacementHeaders" in entry:
        template["Headers"] = entry["ReplacementHeaders"]
    common = {name: value for name, value in request.items() if name not in ("BulkEmailEntries", "DefaultContent")}
    own = {"Destination": entry["Destination"], "EmailTags": entry["ReplacementTags"]}
    return {**common, **own, "Content": {"Template": template}}


def _groups(
    parts: Iterable[tuple[OutgoingEmail, BulkEntry | None]],
) -> Iterable[tuple[list[OutgoingEmail], list[BulkEntry]]]:
    """Groups of emails that may be in one call, because their entries have the same key."""
    groups: defaultdict[object, tuple[list[OutgoingEmail], list[BulkEntry]]] = defaultdict(lambda: ([], []))
    for email, part in parts:
        if part is not None:
            together, their_parts = groups[part.key]
            together.append(email)
            their_parts.append(part)
    return groups.values()
