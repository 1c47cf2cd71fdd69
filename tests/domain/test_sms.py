from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatcher import InvalidEmail, Sms
from dispatcher.domain.sms import Alphabet, Segments, segments_of
from dispatcher.domain.suppression import Recipient

NUMBER = "+4915112345678"


def sms(**changes: Any) -> Sms:
    return Sms(**{"message_key": "login-7", "to": NUMBER, "text": "Your code is 1234.", **changes})


@pytest.mark.parametrize("written", ["+49 151 12345678", "+49-151-12345678", "+49 (151) 12345678", "+49 0151 12345678"])
def test_a_number_is_kept_in_e164(written: str) -> None:
    assert sms(to=written).to == (NUMBER,)


@pytest.mark.parametrize(
    ("former", "present"), [("+52 1 55 1234 5678", "+525512345678"), ("+229 97 12 34 56", "+2290197123456")]
)
def test_a_number_in_a_former_form_gets_the_present_form(former: str, present: str) -> None:
    assert sms(to=former).to == sms(to=present).to == (present,)
    assert Recipient.parse(former) == Recipient.parse(present)


@pytest.mark.parametrize(
    "written", ["015112345678", "004915112345678", "+1415555", "+4915112345678x12", "ann@example.org", "", "+49" * 30]
)
def test_a_text_that_is_no_possible_number_is_refused_without_repeating_it(written: str) -> None:
    with pytest.raises(InvalidEmail) as caught:
        sms(to=written)

    assert caught.value.field == "to"
    assert not written or written not in str(caught.value)


def test_a_possible_but_unassigned_number_is_only_warned_about() -> None:
    unlikely = sms(to="+491000000000")

    assert unlikely.to == ("+491000000000",)
    assert [warning.partition(":")[0] for warning in unlikely.warnings] == ["to"]
    assert sms().warnings == ()


@pytest.mark.parametrize("sender", [NUMBER, "12345", "Example", "Ex 4 U", "MG" + 32 * "0"])
def test_a_sender_is_a_number_a_short_code_a_name_or_a_pool(sender: str) -> None:
    assert sms(sender=sender).sender == sender


@pytest.mark.parametrize("sender", ["a name of 12", "Größe", "1", "shop@example.com", "<b>", "a\nb"])
def test_any_other_sender_is_refused(sender: str) -> None:
    with pytest.raises(InvalidEmail, match="sender"):
        sms(sender=sender)


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("a" * 160, (Alphabet.GSM_7, 1)),
        ("a" * 161, (Alphabet.GSM_7, 2)),
        ("a" * 306, (Alphabet.GSM_7, 2)),
        ("a" * 307, (Alphabet.GSM_7, 3)),
        ("€" * 80, (Alphabet.GSM_7, 1)),
        ("a" + "€" * 80, (Alphabet.GSM_7, 2)),
        # 152 + 2 do not fit into 153 septets, so the sign of the euro begins the second segment.
        ("a" * 152 + "€" + "a" * 151, (Alphabet.GSM_7, 2)),
        ("a" * 152 + "€" + "a" * 152, (Alphabet.GSM_7, 3)),
        ("я" * 70, (Alphabet.UCS_2, 1)),
        ("я" * 71, (Alphabet.UCS_2, 2)),
        ("🙂" * 35, (Alphabet.UCS_2, 1)),
        ("🙂" * 36, (Alphabet.UCS_2, 2)),
        # 33 pairs fit into the 67 units of a segment; a pair is never split.
        ("🙂" * 67, (Alphabet.UCS_2, 3)),
    ],
)
def test_segments(text: str, segments: tuple[Alphabet, int]) -> None:
    assert segments_of(text) == Segments(*segments)


def test_one_curly_quote_that_doubles_the_price_is_reported() -> None:
    plain, curly = sms(text="it's " * 30), sms(text="it\u2019s " * 30)

    assert plain.warnings == ()
    assert curly.warnings == ("text: U+2019 is not in GSM-7, so the text takes 3 segments instead of 1.",)


@pytest.mark.parametrize("text", ["", "  ", "a\0b", "a\ud800", "a" * 1601])
def test_a_text_that_no_network_takes_is_refused(text: str) -> None:
    with pytest.raises(InvalidEmail, match="text"):
        sms(text=text)


def test_json_gives_an_equal_sms() -> None:
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    full = sms(sender="Example", tags=["otp"], tenant_id="acme", on_uncertain="resend", lane="urgent", expires_at=later)

    again = Sms.from_json(full.to_json())

    assert again == full
    assert again.payload_hash() == full.payload_hash()
    assert "text" not in repr(full)
    assert NUMBER not in repr(full)


@pytest.mark.parametrize("change", [{"subject": "Hello"}, {"to": None}, {"text": 7}, {"to": [NUMBER]}, {"from": "!"}])
def test_json_that_is_no_sms_is_refused_by_the_name_of_its_field(change: dict[str, object]) -> None:
    with pytest.raises(InvalidEmail) as caught:
        Sms.from_json({**sms().to_json(), **change})

    assert caught.value.field == next(iter(change))


@pytest.mark.parametrize(
    "change",
    [{"text": "other"}, {"to": "+4915112345679"}, {"sender": "Shop"}, {"lane": "bulk"}, {"ignore_suppression": True}],
)
def test_a_repeated_key_with_a_different_sms_is_a_conflict(change: dict[str, Any]) -> None:
    assert sms(**change).payload_hash() != sms().payload_hash()


def test_a_number_is_masked_for_operators() -> None:
    assert Recipient.parse("+49 151 12345678").masked == "+49•••78"
