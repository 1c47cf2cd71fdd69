"""Which SMS from recipients are STOP or START."""

from __future__ import annotations

import pytest

from dispatcher.domain.suppression import Reply, reply_in

US, UK = "+14155550100", "+447700900123"


@pytest.mark.parametrize(
    "text", ["STOP", "stopall", "Unsubscribe", "CANCEL", "end", "quit", "OPTOUT", "Opt-Out", "opt\xa0out", "revoke"]
)
def test_a_carriers_standard_word_is_stop(text: str) -> None:
    assert reply_in(text, UK) is Reply.STOP


@pytest.mark.parametrize(
    "text",
    [
        "Stop.",
        "  stop!!! ",
        '"STOP"',
        "\uff33\uff34\uff2f\uff30",
        "STOP 🛑",
        "🙏 stop please",
        "Please STOP",
        "STOP, thank you",
        "stop all messages",
        "please stop texting me",
        "STOP 36180",
        "STOP STOP STOP",
        "opt out",
        "STOP\n-- \nSent from my phone",
        "Stop! Who is this?",
        "STOP. I never signed up for this.",
    ],
)
def test_courtesy_punctuation_and_further_sentences_do_not_matter(text: str) -> None:
    assert reply_in(text, UK) is Reply.STOP


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("+33612345678", "Arrêt"),
        ("+33612345678", "ARRE\u0302T svp"),
        ("+33612345678", "Arrêter, s'il vous plaît"),
        (US, "ARRET"),
        (US, "parar"),
        ("+34612345678", "BAJA por favor"),
        ("+5215512345678", "Parar"),
        ("+5491123456789", "baja"),
        ("+4915112345678", "Stopp bitte!"),
        ("+46701234567", "stopp tack"),
        ("+4791234567", "Stopp"),
        ("+4520123456", "afmeld"),
        ("+5511987654321", "SAIR"),
        ("+351912345678", "pare"),
        ("+393201234567", "disiscrivi"),
        ("+31612345678", "afmelden aub"),
        ("+32470123456", "arrêt"),
        ("+48512345678", "Rezygnuję"),
        ("+79161234567", "СТОП"),
        ("+8613912345678", "TD"),
        ("+972501234567", "הסר"),
    ],
)
def test_the_languages_of_the_numbers_country_count(number: str, text: str) -> None:
    assert reply_in(text, number) is Reply.STOP


@pytest.mark.parametrize(
    "text",
    [
        "",
        "🛑",
        "don't stop",
        "please don\u2019t stop",
        "please do not stop",
        "please stop by at 5",
        "Stop at the shop",
        "cancel my appointment",
        "the end of the day",
        "I want this to stop being so late",
        "thank you",
        "nonstop",
        "Arrêt",
        "HELP",
    ],
)
def test_any_other_text_is_no_stop(text: str) -> None:
    assert reply_in(text, UK) is None


@pytest.mark.parametrize(
    ("number", "text", "reply"),
    [
        (UK, "START", Reply.START),
        (UK, "Start, please!", Reply.START),
        (UK, "unstop", Reply.START),
        (UK, "opt in", Reply.START),
        (UK, "Yes.", Reply.START),
        ("+5215512345678", "Alta", Reply.START),
        (UK, "Yes. See you at 5", None),
        (UK, "Yes please", None),
        (UK, "Start. At which time do we meet?", None),
        (UK, "start stop", None),
    ],
)
def test_start_is_the_whole_text(number: str, text: str, reply: Reply | None) -> None:
    assert reply_in(text, number) is reply
