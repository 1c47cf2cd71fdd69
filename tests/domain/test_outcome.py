"""Tests what an outcome says about single recipients, and whether the outcome concerns the email or the provider."""

from __future__ import annotations

import pytest

from dispatcher.domain.outcome import Concern, Deferred, Reason, Rejected, left_out
from dispatcher.domain.provider_text import RELAY


@pytest.mark.parametrize(
    ("detail", "recipients"),
    [
        (None, None),
        ("250 2.0.0 queued", None),
        ("refused recipients: 2 (550 5.1.1)", "2 (550 5.1.1)"),
        ("refused recipients: 2 (550 5.1.1), 3 (451); 250 2.0.0 queued; thanks", "2 (550 5.1.1), 3 (451)"),
    ],
)
def test_an_acceptance_lists_the_recipients_that_it_refused(detail: str | None, recipients: str | None) -> None:
    assert left_out(detail) == recipients


@pytest.mark.parametrize(
    ("refusal", "concern"),
    [
        (Deferred(Reason.RECIPIENT_DEFERRED), Concern.EMAIL),
        (Deferred(Reason.SERVER_ERROR), Concern.EITHER),
        (Deferred(Reason.CONNECTION_FAILED), Concern.PROVIDER),
        (Deferred(Reason.CONNECTION_FAILED, known_concern=Concern.EMAIL), Concern.EMAIL),
        (Deferred(Reason.RECIPIENT_DEFERRED, fault=RELAY), Concern.EITHER),
        (Rejected(Reason.REJECTED_RECIPIENT, code="550 5.1.1"), Concern.EMAIL),
        (Rejected(Reason.INVALID_CONTENT, code="422"), Concern.EMAIL),
        (Rejected(Reason.REFUSED, code="550"), Concern.EITHER),
        (Rejected(Reason.REJECTED_SENDER, code="553"), Concern.EITHER),
        (Rejected(Reason.REJECTED_SENDER), Concern.EMAIL),
    ],
)
def test_the_concern_of_a_refusal_comes_from_the_adapter_or_from_its_reason(
    refusal: Deferred | Rejected, concern: Concern
) -> None:
    assert refusal.concern is concern
