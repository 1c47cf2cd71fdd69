"""Which numbers and texts an SMS may have, what it costs, and which replies are STOP or START."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dispatcher import InvalidEmail, Sms
from dispatcher.domain.phone import sms_number
from dispatcher.domain.sms import Alphabet, Segments, SmsRules, segments_of
from dispatcher.domain.suppression import Recipient, Reply, reply_in

NUMBER = "+4915112345678"


def sms(**changes: Any) -> Sms:
    return Sms(**{"message_key": "login-7", "to": NUMBER, "text": "Your code is 1234.", **changes})


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        *((written, NUMBER) for written in ("+49 151 12345678", "+49-151-12345678", "+49 (151) 12345678")),
        ("+49 0151 12345678", NUMBER),
        ("+52 1 55 1234 5678", "+525512345678"),  # former forms
        ("+229 97 12 34 56", "+2290197123456"),
    ],
)
def test_a_number_is_kept_in_the_present_form_of_e164(written: str, kept: str) -> None:
    assert sms(to=written).to == sms(to=kept).to == (kept,)
    assert Recipient.parse(written) == Recipient.parse(kept)
    assert Recipient.parse(written).masked == f"{kept[:3]}•••{kept[-2:]}", "as operators see it"


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
        *(("a" * count, (Alphabet.GSM_7, segments)) for count, segments in ((160, 1), (161, 2), (306, 2), (307, 3))),
        ("€" * 80, (Alphabet.GSM_7, 1)),
        ("a" + "€" * 80, (Alphabet.GSM_7, 2)),
        # 152 + 2 do not fit into 153 septets, so the sign of the euro begins the second segment.
        ("a" * 152 + "€" + "a" * 151, (Alphabet.GSM_7, 2)),
        ("a" * 152 + "€" + "a" * 152, (Alphabet.GSM_7, 3)),
        *(("я" * count, (Alphabet.UCS_2, segments)) for count, segments in ((70, 1), (71, 2))),
        *(("🙂" * count, (Alphabet.UCS_2, segments)) for count, segments in ((35, 1), (36, 2))),
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
    texts = {"sender": "Example", "tenant_id": "acme", "on_uncertain": "resend", "lane": "urgent"}
    full = sms(tags=["otp"], metadata={"order": "17"}, expires_at=later, **texts)

    again = Sms.from_json(full.to_json())
    assert Sms.from_json({**full.to_json(), "to": list(full.to)}) == again

    assert again == full
    assert again.payload_hash() == full.payload_hash()
    assert "text" not in repr(full)
    assert NUMBER not in repr(full)


@pytest.mark.parametrize("change", [{"subject": "Hi"}, {"to": None}, {"text": 7}, {"to": [NUMBER] * 2}, {"from": "!"}])
def test_json_that_is_no_sms_is_refused_by_the_name_of_its_field(change: dict[str, object]) -> None:
    with pytest.raises(InvalidEmail) as caught:
        Sms.from_json({**sms().to_json(), **change})

    assert caught.value.field == next(iter(change))


@pytest.mark.parametrize(
    "change",
    [{"text": "other"}, {"to": "+4915112345679"}, {"sender": "Shop"}, {"lane": "bulk"}, {"metadata": {"a": "1"}}],
)
def test_a_repeated_key_with_a_different_sms_is_a_conflict(change: dict[str, Any]) -> None:
    assert sms(**change).payload_hash() != sms().payload_hash()


COSTLY = {
    "premium-rate": (
        *("+449098790000", "+19002345678", "+499001234567", "+33899123456", "+37190012345", "+448712345678"),
    ),
    "shared-cost": ("+491801123456", "+41840123456"),
    "personal": ("+447012345678", "+15002345678"),
    "pager": ("+447640123456", "+4916412345"),
    "universal access": ("+445512345678",),
    "+979, which belongs to no country": ("+979123456789",),
    "+881, which belongs to no country": ("+881612345678",),
    "+870, which belongs to no country": ("+870773111632",),
    "+883, which belongs to no country": ("+883510012345", "+88351000000000"),  # the second is not assigned
}


@pytest.mark.parametrize(("number", "kind"), [(number, kind) for kind, numbers in COSTLY.items() for number in numbers])
def test_an_sms_to_a_number_that_costs_more_is_refused_without_repeating_the_number(number: str, kind: str) -> None:
    with pytest.raises(InvalidEmail) as caught:
        Sms(message_key="k", to=number, text="t")

    assert caught.value.field == "to"
    assert kind in caught.value.reason
    assert number[1:] not in str(caught.value)
    fault = SmsRules(countries=None).fault(number, "t")
    assert (fault and fault.field) == "to", "all countries do not include such numbers"


@pytest.mark.parametrize("number", ["+4980012345678", "+18005550199"])
def test_a_toll_free_number_costs_no_more(number: str) -> None:
    assert SmsRules().fault(number, "t") is None


@pytest.mark.parametrize(
    ("number", "country"),
    [
        *(("+4915112345678", "DE"), ("+491000000000", "DE")),  # the second is not assigned, but +49 is one country's
        *(("+14155550100", "US"), ("+14165550100", "CA"), ("+18765551234", "JM"), ("+18095551234", "DO")),
        *(("+12425551234", "BS"), ("+447400123456", "GB"), ("+447781123456", "GG"), ("+79161234567", "RU")),
        *(("+77012345678", "KZ"), ("+447700900123", None)),  # the second is not assigned, and 4 countries share +44
        ("+15551234567", None),  # not assigned, and 25 countries share +1
    ],
)
def test_the_country_is_that_of_the_number_and_not_of_the_calling_code(number: str, country: str | None) -> None:
    assert sms_number("to", number) == (number, country)
    allowed = SmsRules(countries=frozenset({"DE", "US", "CA", "GB", "RU"})).fault(number, "t")
    assert (allowed is None) == (country in {"DE", "US", "CA", "GB", "RU"})
    assert SmsRules(countries=None).fault(number, "t") is None


@pytest.mark.parametrize("to", ["", "0151", "ann@example.org", "+0", "+49 151 12345678x12"])
def test_a_row_with_a_text_that_is_no_number_is_refused(to: str) -> None:
    fault = SmsRules().fault(to, "t")

    assert fault is not None
    assert fault.field == "to"


US, UK = "+14155550100", "+447700900123"
STOPS = (
    *("STOP", "stopall", "Unsubscribe", "CANCEL", "end", "quit", "OPTOUT", "Opt-Out", "opt\xa0out", "revoke", "Stop."),
    *("  stop!!! ", '"STOP"', "\uff33\uff34\uff2f\uff30", "STOP 🛑", "🙏 stop please", "Please STOP"),
    "STOP, thank you",
    *("stop all messages", "please stop texting me", "STOP 36180", "STOP STOP STOP", "opt out", "Stop! Who is this?"),
    *("STOP\n-- \nSent from my phone", "STOP. I never signed up for this."),
)
STOPS_OF_COUNTRIES = {
    "+33612345678": ("Arrêt", "ARRE\u0302T svp", "Arrêter, s'il vous plaît"),
    US: ("ARRET", "parar"),
    "+34612345678": ("BAJA por favor",),
    "+5215512345678": ("Parar",),
    "+5491123456789": ("baja",),
    "+4915112345678": ("Stopp bitte!",),
    "+46701234567": ("stopp tack",),
    "+4791234567": ("Stopp",),
    "+4520123456": ("afmeld",),
    "+5511987654321": ("SAIR",),
    "+351912345678": ("pare",),
    "+393201234567": ("disiscrivi",),
    "+31612345678": ("afmelden aub",),
    "+32470123456": ("arrêt",),
    "+48512345678": ("Rezygnuję",),
    "+79161234567": ("СТОП",),
    "+8613912345678": ("TD",),
    "+972501234567": ("הסר",),
}
OTHERS = (
    *("", "🛑", "don't stop", "please don\u2019t stop", "please do not stop", "please stop by at 5"),
    "Stop at the shop",
    *("cancel my appointment", "the end of the day", "I want this to stop being so late", "thank you", "nonstop"),
    *("Arrêt", "HELP", "Yes. See you at 5", "Yes please", "Start. At which time do we meet?", "start stop"),
)


@pytest.mark.parametrize(
    ("number", "text", "reply"),
    [
        *((UK, text, Reply.STOP) for text in STOPS),
        *((number, text, Reply.STOP) for number, texts in STOPS_OF_COUNTRIES.items() for text in texts),
        *((UK, text, Reply.START) for text in ("START", "Start, please!", "unstop", "opt in", "Yes.")),
        ("+5215512345678", "Alta", Reply.START),
        *((UK, text, None) for text in OTHERS),
    ],
)
def test_a_reply_is_stop_or_start_by_the_words_of_its_numbers_country_or_neither(
    number: str, text: str, reply: Reply | None
) -> None:
    assert reply_in(text, number) is reply
