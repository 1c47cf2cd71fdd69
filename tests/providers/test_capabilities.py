"""Each provider declares its capabilities, and an error explains why no provider supports an email."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.domain.outgoing import Attachment
from dispatcher.providers.capabilities import capabilities_of, capability_gap
from tests.providers.emails import an_email

OURS = ("capture", "resend", "sendgrid", "ses", "smtp")
TEMPLATE = {"template_id": "d-1", "text": None}
FILE = {"attachments": (Attachment("film.mp4", "video/mp4", b"x" * 24 * 1024 * 1024),)}
HEADERS = {**TEMPLATE, "headers": {f"X-{number}": "x" for number in range(16)}}
FOREIGN_HEADER = {**TEMPLATE, "headers": {"X-Campaign": "Grüße"}}
EMPTY_FILE = {"attachments": (Attachment("empty.txt", "text/plain", b""),)}
ONLY_BCC = {"to": (), "bcc": ("ann@example.com", "bob@example.com")}
LONG = {"to": (f"{'a' * 74}@desk.example.com",)}
MANY = {"to": tuple(f"ann-{number}@example.com" for number in range(60))}
LARGE = {"attachments": (Attachment("film.mp4", "video/mp4", b"x" * 32 * 1024 * 1024),)}


@pytest.mark.parametrize(
    ("changes", "able"),
    [
        ({}, ["capture", "resend", "sendgrid", "ses", "smtp"]),
        (TEMPLATE, ["resend", "sendgrid", "ses"]),
        (MANY, ["capture", "sendgrid", "smtp"]),
        (FILE, ["capture", "resend", "ses", "smtp"]),
        ({"reply_to": ("zoë@example.com",)}, ["capture", "resend", "sendgrid", "smtp"]),
        ({"to": ("Zoë <zoe@exämple.com>",)}, ["capture", "resend", "sendgrid", "ses", "smtp"]),
        ({**TEMPLATE, **MANY}, ["sendgrid"]),
        ({"subject": ""}, ["capture", "ses", "smtp"]),
        ({**TEMPLATE, "subject": ""}, ["resend", "sendgrid", "ses"]),
        (EMPTY_FILE, ["capture", "ses", "smtp"]),
        (ONLY_BCC, ["capture", "sendgrid", "ses", "smtp"]),
        ({"to": (), "bcc": ("ann@example.com",)}, ["capture", "resend", "sendgrid", "ses", "smtp"]),
        (LONG, ["capture", "sendgrid", "smtp"]),
        ({"sender": f"Shop <{'ü' * 33}@example.com>"}, ["capture", "sendgrid", "smtp"]),
        ({"to": (f"Ann <{'a' * 64}@desk.example.com>",)}, ["capture", "resend", "sendgrid", "ses", "smtp"]),
        (HEADERS, ["resend", "sendgrid"]),
        (FOREIGN_HEADER, ["resend", "sendgrid"]),
        ({**HEADERS, "template_id": None, "text": "x"}, ["capture", "resend", "sendgrid", "ses", "smtp"]),
    ],
    ids=[
        *("plain", "template", "60 recipients", "file of 24 MiB", "smtputf8", "name and domain", "both"),
        *("no subject", "template without subject", "empty file", "several bcc only", "one bcc only"),
        *("74 bytes before the @", "66 bytes in 33 letters", "64 bytes before the @"),
        *("16 headers", "header not ASCII", "16 headers, no template"),
    ],
)
def test_each_provider_supports_what_it_declares(changes: dict[str, Any], able: list[str]) -> None:
    email = an_email(**changes)

    capabilities = capabilities_of(OURS)

    assert [name for name, one in capabilities.items() if one.unmet_requirement(email) is None] == able


ADD = "Add one to DISPATCHER_PROVIDERS, or"


@pytest.mark.parametrize(
    ("changes", "configured", "field", "words"),
    [
        (TEMPLATE, ["smtp", "capture"], "template_id",
         ("template_id needs a provider with templates (resend, sendgrid, ses); configured: smtp, capture. "
         f"{ADD} set text or html.")),
        (MANY, ["ses"], "to",
         ("the number of recipients needs a provider with a limit of at least 60 recipients (sendgrid, smtp); "
         f"configured: ses. {ADD} split the email.")),
        ({**TEMPLATE, **MANY}, ["smtp", "ses"], "template_id",
         ("template_id and the number of recipients need a provider with templates and a limit of at least 60 "
         f"recipients (sendgrid); configured: smtp, ses. {ADD} set text or html and split the email.")),
        ({"to": ("zoë@example.com",)}, ["ses"], "to",
         ("an address in to needs a provider with SMTPUTF8 (resend, sendgrid, smtp); configured: ses. "
         f"{ADD} use another address.")),
        (EMPTY_FILE, ["sendgrid"], "attachments",
         ("an attachment of 0 bytes needs a provider with support for it (ses, smtp); configured: sendgrid. "
         f"{ADD} remove the attachment.")),
        (LONG, ["ses"], "to",
         ("an address in to needs a provider with support for more than 64 bytes before the @ (sendgrid, smtp); "
         f"configured: ses. {ADD} use another address.")),
        ({**TEMPLATE, **LARGE}, ["sendgrid"], "attachments",
         ("the email's size needs a provider with a limit of at least 44,739,242 octets (none is known); "
         "configured: sendgrid. Use smaller attachments.")),
    ],
    ids=["template", "recipients", "two needs", "smtputf8", "empty file", "local part", "nobody"],
)  # fmt: skip
def test_an_unsupported_email_names_the_missing_feature_and_the_providers_that_have_it(
    changes: dict[str, Any], configured: list[str], field: str, words: str
) -> None:
    why = capability_gap(an_email(**changes), capabilities_of(configured))

    assert why is not None
    assert (why.field, f"{why.message} {why.remedy}") == (field, words)


@pytest.mark.parametrize("configured", [["smtp", "ses"], []], ids=["one can", "none is configured"])
def test_an_email_passes_if_any_configured_provider_may_support_it(configured: list[str]) -> None:
    assert capability_gap(an_email(**TEMPLATE), capabilities_of(configured)) is None
