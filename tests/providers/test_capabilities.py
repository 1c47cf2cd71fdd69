"""Each provider declares its capabilities, and an error explains why no provider supports an email."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.domain.email import Email
from dispatcher.domain.outgoing import Attachment
from dispatcher.providers.capabilities import capabilities_of, capability_gap
from tests.providers.emails import an_email

OURS = ("capture", "sendgrid", "ses", "smtp")
TEMPLATE = {"template_id": "d-1", "text": None}
FILE = {"attachments": (Attachment("film.mp4", "video/mp4", b"x" * 24 * 1024 * 1024),)}
MANY = {"to": tuple(f"ann-{number}@example.com" for number in range(60))}
LARGE = {"attachments": (Attachment("film.mp4", "video/mp4", b"x" * 32 * 1024 * 1024),)}


@pytest.mark.parametrize(
    ("changes", "able"),
    [
        ({}, ["capture", "sendgrid", "ses", "smtp"]),
        (TEMPLATE, ["sendgrid", "ses"]),
        (MANY, ["capture", "sendgrid", "smtp"]),
        (FILE, ["capture", "ses", "smtp"]),
        ({"reply_to": ("zoë@example.com",)}, ["capture", "sendgrid", "smtp"]),
        ({"to": ("Zoë <zoe@exämple.com>",)}, ["capture", "sendgrid", "ses", "smtp"]),
        ({**TEMPLATE, **MANY}, ["sendgrid"]),
    ],
    ids=["plain", "template", "60 recipients", "file of 24 MiB", "smtputf8", "name and domain", "both"],
)
def test_each_provider_supports_what_it_declares(changes: dict[str, Any], able: list[str]) -> None:
    email = an_email(**changes)

    capabilities = capabilities_of(OURS)

    assert [name for name, one in capabilities.items() if one.unmet_requirement(email) is None] == able


@pytest.mark.parametrize(
    ("changes", "configured", "field", "message", "remedy"),
    [
        (
            TEMPLATE,
            ["smtp", "capture"],
            "template_id",
            "template_id needs a provider with templates (resend, sendgrid, ses); configured: smtp, capture.",
            "Add one to DISPATCHER_PROVIDERS, or set text or html.",
        ),
        (
            MANY,
            ["ses"],
            "to",
            (
                "the number of recipients needs a provider with a limit of at least 60 recipients (sendgrid, smtp); "
                "configured: ses."
            ),
            "Add one to DISPATCHER_PROVIDERS, or split the email.",
        ),
        (
            {**TEMPLATE, **MANY},
            ["smtp", "ses"],
            "template_id",
            (
                "template_id and the number of recipients need a provider with templates and a limit of at least 60 "
                "recipients (sendgrid); configured: smtp, ses."
            ),
            "Add one to DISPATCHER_PROVIDERS, or set text or html and split the email.",
        ),
        (
            {"to": ("zoë@example.com",)},
            ["ses"],
            "to",
            "an address in to needs a provider with SMTPUTF8 (resend, sendgrid, smtp); configured: ses.",
            "Add one to DISPATCHER_PROVIDERS, or use another address.",
        ),
        (
            {**TEMPLATE, **LARGE},
            ["sendgrid"],
            "attachments",
            (
                "the email's size needs a provider with a limit of at least 44,739,242 octets (none is known); "
                "configured: sendgrid."
            ),
            "Use smaller attachments.",
        ),
    ],
    ids=["template", "recipients", "two needs", "smtputf8", "nobody"],
)
def test_an_unsupported_email_names_the_missing_feature_and_the_providers_that_have_it(
    changes: dict[str, Any], configured: list[str], field: str, message: str, remedy: str
) -> None:
    why = capability_gap(an_email(**changes), capabilities_of(configured))

    assert why is not None
    assert (why.field, why.message, why.remedy) == (field, message, remedy)


@pytest.mark.parametrize("configured", [["smtp", "ses"], []], ids=["one can", "none is configured"])
def test_an_email_passes_if_any_configured_provider_may_support_it(configured: list[str]) -> None:
    assert capability_gap(an_email(**TEMPLATE), capabilities_of(configured)) is None


def test_the_same_check_applies_before_enqueueing() -> None:
    email = Email(message_key="k", sender="shop@example.com", to="ann@example.org", template_id="d-1")

    assert capability_gap(email, capabilities_of(["smtp"])) is not None
