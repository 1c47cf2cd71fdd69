"""Private values of an email that a provider repeats are removed from the provider's error text. The rest stays
readable."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

import pytest

from dispatcher.domain.outcome import Accepted, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.domain.provider_text import without_echo, words_without_echo

EMAIL = OutgoingEmail(
    email_id=UUID(int=1),
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    sender="Shop <shop@example.com>",
    to=('"Lee, Annabel" <ann.lee@example.org>', "kim+news@example.org", '"eva w."@example.org'),
    bcc=("zoë@example.org",),
    subject="Your results of Tuesday",
    text="Dear Annabel,\nthe code is 48213 and it is\nvalid for ten minutes. Mail us.",
    html="<p>Your <b>balance is overdrawn</b> again</p>",
    headers={"X-Case": "divorce"},
    attachments=(OutgoingAttachment("x-ray of the left foot.png", "image/png", b"."),),
    template_data={"who": {"iban": "DE02120300000000202051"}},
)


@pytest.mark.parametrize(
    ("words", "safe"),
    [
        ("no such user ann.lee here", "no such user <private> here"),
        ("ANN.LEE: mailbox full", "<private>: mailbox full"),
        ("ann.lee=example.org does not exist", "<private>=example.org does not exist"),
        ("zoë is unknown", "<private> is unknown"),
        ("kim+news is unknown", "<private> is unknown"),
        ("mailbox kim is full", "mailbox <private> is full"),
        ("no mailbox eva w. here", "no mailbox <private> here"),
        ("Annabel has moved", "<private> has moved"),
        ("subject 'Your Results of  Tuesday' looks like spam", "subject '<private>' looks like spam"),
        ('"results of tuesday" is blocked', '"<private>" is blocked'),
        ("the code is 48213 and it is valid", "<private>"),
        ("48213 is in a blocked message", "<private> is in a blocked message"),
        ("balance is overdrawn: refused", "<private>: refused"),
        ("divorce mail is not wanted", "<private> mail is not wanted"),
        ("x-ray of the left foot.png has a virus", "<private> has a virus"),
        ("DE02120300000000202051 is an account", "<private> is an account"),
        ("a subject that was cut: Your resul…", "a subject that was cut: Your …"),
        ("550 5.7.1 Mail is not accepted, it is spam", "550 5.7.1 Mail is not accepted, it is spam"),
        ("5.2.2 mailbox of example.org is full", "5.2.2 mailbox of example.org is full"),
    ],
)
def test_text_that_repeats_the_email_is_removed(words: str, safe: str) -> None:
    assert words_without_echo(words, EMAIL) == safe


def test_our_list_of_refused_recipients_stays_even_if_a_name_matches_it() -> None:
    email = replace(EMAIL, to=("recipients@example.org", "refused@example.org"), subject="Refused")
    detail = "refused recipients: 2 (550 5.1.1); 250 ok, but refused is gone"

    cleaned = without_echo(Accepted(None, detail), email)

    assert cleaned == Accepted(None, "refused recipients: 2 (550 5.1.1); 250 ok, but <private> is gone")


def test_an_acceptance_loses_names_and_keeps_everything_else() -> None:
    plain = Accepted("4Xk2", "250 2.0.0 Ok: queued as 4Xk2")

    assert without_echo(plain, EMAIL) is plain
    assert without_echo(Accepted(None, "250 kim may read it"), EMAIL) == Accepted(None, "250 <private> may read it")
    assert without_echo(Accepted(None, "250 ann.lee may read it"), EMAIL) == Accepted(None, "250 <private> may read it")
    assert without_echo(Accepted(None, "250 Your Results of Tuesday"), EMAIL) == Accepted(None, "250 <private>")


def test_reason_and_code_are_unchanged() -> None:
    refused = Rejected(Reason.REFUSED, "ann.lee is gone", "550 5.1.1")

    assert without_echo(refused, EMAIL) == replace(refused, detail="<private> is gone")


def test_an_email_with_a_template_has_no_bodies_to_compare() -> None:
    email = replace(EMAIL, text=None, html=None, template_id="d-1")

    assert words_without_echo("no such user", email) == "no such user"
