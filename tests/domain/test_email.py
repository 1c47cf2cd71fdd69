"""An `Email` is always valid. An error contains the name of the invalid field, but never its value."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.domain import email_rules as rules
from dispatcher.domain.email import Email
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import Attachment, OutgoingAttachment
from dispatcher.domain.sms import Sms
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.text import MAX_KEY_CHARACTERS, MAX_TENANT_CHARACTERS
from dispatcher.errors import InvalidEmail

PDF = Attachment("receipt.pdf", "application/pdf", b"%PDF")
MIB = 1024 * 1024


def an_email(**fields: Any) -> Email:
    """A valid plain email with the given fields changed."""
    plain = {
        "message_key": "order-17",
        "sender": "shop@example.com",
        "to": "ann@example.org",
        "subject": "Hi",
        "text": "Hi",
    }
    return Email(**(plain | fields))


def refusal(**fields: Any) -> tuple[str, str]:
    """The field and the reason of the error for a plain email with these fields changed."""
    with pytest.raises(InvalidEmail) as caught:
        an_email(**fields)
    return caught.value.field, caught.value.reason


def test_optional_fields_have_their_defaults() -> None:
    email = an_email()

    assert (email.to, email.cc, email.bcc, email.reply_to) == (("ann@example.org",), (), (), ())
    assert (email.text, email.html) == ("Hi", None)
    assert (dict(email.headers), email.attachments, email.tags) == ({}, (), ())
    assert (email.tenant_id, email.correlation_id, email.on_uncertain) == ("default", None, None)


def test_one_address_or_a_list_becomes_a_tuple() -> None:
    email = an_email(
        to=["a@x.example", "B <b@x.example>"], cc="c@x.example", bcc=("d@x.example",), reply_to=["e@x.example"]
    )

    assert email.to == ("a@x.example", "B <b@x.example>")
    assert (email.cc, email.bcc, email.reply_to) == (("c@x.example",), ("d@x.example",), ("e@x.example",))


def test_an_email_may_have_only_bcc_recipients() -> None:
    assert an_email(to=(), bcc="ann@example.org").bcc == ("ann@example.org",)


def test_an_empty_body_counts_as_absent() -> None:
    assert an_email(text="", html="<p>Hi</p>").text is None
    assert refusal(text="", html="")[0] == "text"
    assert refusal(text=None)[0] == "text"


def test_the_policy_may_be_given_by_its_name() -> None:
    assert an_email(on_uncertain="resend").on_uncertain is OnUncertain.RESEND
    assert an_email(on_uncertain=OnUncertain.HOLD).on_uncertain is OnUncertain.HOLD
    assert refusal(on_uncertain="retry") == ("on_uncertain", "must be one of: hold, resend")


def test_an_email_is_immutable_and_can_be_compared_hashed_and_replaced() -> None:
    email = an_email(headers={"X-Order": "17"})

    with pytest.raises(dataclasses.FrozenInstanceError):
        email.subject = "Other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        email.headers["X-Other"] = "1"  # type: ignore[index]
    assert email == an_email(headers={"X-Order": "17"})
    assert hash(email) == hash(an_email(headers={"X-Order": "17"}))
    assert dataclasses.replace(email, subject="Other").subject == "Other"


def test_changing_the_arguments_later_does_not_change_the_email() -> None:
    to, headers, attachments = ["ann@example.org"], {"X-Order": "17"}, [PDF]
    email = an_email(to=to, headers=headers, attachments=attachments)

    to.append("bob@example.org\r\n")
    headers["Bcc"] = "bob@example.org"
    attachments.clear()

    assert email == an_email(headers={"X-Order": "17"}, attachments=[PDF])


def test_a_subclass_of_str_is_kept_as_a_plain_str() -> None:
    class Key(StrEnum):
        RECEIPT = "receipt"

    email = an_email(message_key=Key.RECEIPT, headers={Key.RECEIPT: Key.RECEIPT})

    assert type(email.message_key) is str
    assert [(type(name), type(value)) for name, value in email.headers.items()] == [(str, str)]


def test_the_repr_shows_nothing_private() -> None:
    email = an_email(subject="SECRET", text="SECRET", html="SECRET", headers={"X-A": "SECRET"}, attachments=[PDF])

    assert "SECRET" not in repr(email)
    assert "example" not in repr(email)
    assert "order-17" in repr(email)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"message_key": ""}, "message_key"),
        ({"message_key": "k" * 256}, "message_key"),
        ({"message_key": "a\nb"}, "message_key"),
        ({"message_key": "order-17 "}, "message_key"),
        ({"correlation_id": " r"}, "correlation_id"),
        ({"message_key": "a\u200bb"}, "message_key"),
        ({"message_key": "a\ud800"}, "message_key"),
        ({"message_key": 17}, "message_key"),
        ({"message_key": None}, "message_key"),
        ({"tenant_id": ""}, "tenant_id"),
        ({"tenant_id": "a b"}, "tenant_id"),
        ({"tenant_id": "acme\n"}, "tenant_id"),
        ({"tenant_id": "ácme"}, "tenant_id"),
        ({"tenant_id": "-acme"}, "tenant_id"),
        ({"tenant_id": "a" * 101}, "tenant_id"),
        ({"sender": ""}, "sender"),
        ({"sender": "nobody"}, "sender"),
        ({"sender": ["shop@example.com"]}, "sender"),
        ({"sender": "shop@example.com\nBcc: x@example.com"}, "sender"),
        ({"to": ()}, "to"),
        ({"to": None}, "to"),
        ({"to": b"ann@example.org"}, "to"),
        ({"to": {"ann@example.org"}}, "to"),
        ({"to": "nobody"}, "to"),
        ({"to": ["ann@example.org", "nobody"]}, "to[1]"),
        ({"to": ["ann@example.org", 17]}, "to[1]"),
        ({"to": ["ann@example.org", ["bob@example.org"]]}, "to[1]"),
        ({"cc": ["nobody"]}, "cc[0]"),
        ({"bcc": ["nobody"]}, "bcc[0]"),
        ({"reply_to": ["nobody"]}, "reply_to[0]"),
        ({"reply_to": ["ann@example.org"] * 1001}, "reply_to"),
        ({"to": ["ann@example.org"] * 1001}, "to"),
        ({"to": ["ann@example.org"] * 600, "cc": ["ann@example.org"] * 401}, "to"),
        ({"subject": None}, "subject"),
        ({"subject": "s" * 999}, "subject"),
        ({"subject": "Hi\r\nBcc: x@example.com"}, "subject"),
        ({"subject": "Hi\x85Bcc: x@example.com"}, "subject"),
        ({"subject": "Hi\u2028there"}, "subject"),
        ({"subject": "Hi\tthere"}, "subject"),
        ({"subject": "Hi\0"}, "subject"),
        ({"subject": "Hi \ud83d"}, "subject"),
        ({"subject": "=?utf-8?q?Hi=0D=0ABcc=3A_x?="}, "subject"),
        ({"subject": "Re: =? utf-8?B?a?b c?="}, "subject"),
        ({"subject": "=??q??="}, "subject"),
        ({"text": b"Hi"}, "text"),
        ({"text": "a\0b"}, "text"),
        ({"text": "a\ud800b"}, "text"),
        ({"html": "a\0b"}, "html"),
        ({"html": "ü\udfff"}, "html"),
        ({"text": "a" * (10 * MIB + 1)}, "text"),
        ({"text": "ü" * (5 * MIB + 1)}, "text"),
        ({"text": "a" * (5 * MIB), "html": "ü" * (3 * MIB)}, "html"),
        ({"headers": None}, "headers"),
        ({"headers": [("X-A", "1")]}, "headers"),
        ({"headers": {f"X-{number}": "1" for number in range(101)}}, "headers"),
        ({"headers": {"X-A": "1", "x-a": "2"}}, "headers.x-a"),
        ({"headers": {"X-A": "1\r\nBcc: x@example.com"}}, "headers.X-A"),
        ({"headers": {"X-A": "1\n x"}}, "headers.X-A"),
        ({"headers": {"X-A": "v" * 999}}, "headers.X-A"),
        ({"headers": {"X-A": None}}, "headers.X-A"),
        ({"headers": {"X-A": ["1"]}}, "headers.X-A"),
        ({"headers": {"": "1"}}, "headers."),
        ({"headers": {"X A": "1"}}, "headers.X A"),
        ({"headers": {"X-A:": "1"}}, "headers.X-A:"),
        ({"headers": {"Bcc\r\n": "1"}}, "headers.Bcc??"),
        ({"headers": {"X-Ä": "1"}}, "headers.X-Ä"),
        ({"headers": {"X" * 77: "1"}}, f"headers.{'X' * 40}…"),
        ({"headers": {7: "1"}}, "headers.int"),
        ({"attachments": PDF}, "attachments"),
        ({"attachments": [PDF] * 101}, "attachments"),
        ({"attachments": [PDF, {"filename": "a"}]}, "attachments[1]"),
        ({"attachments": [Attachment("a", "a/b", bytes(13 * MIB))] * 2}, "attachments[1].content"),
        ({"tags": ["t"] * 11}, "tags"),
        ({"tags": ["t", "t"]}, "tags"),
        ({"tags": ["t", ""]}, "tags[1]"),
        ({"tags": ["t" * 101]}, "tags[0]"),
        ({"tags": ["a\nb"]}, "tags[0]"),
        ({"tags": [1]}, "tags[0]"),
        ({"correlation_id": ""}, "correlation_id"),
        ({"correlation_id": "c" * 256}, "correlation_id"),
        ({"correlation_id": "c\x1b[31m"}, "correlation_id"),
        ({"on_uncertain": 1}, "on_uncertain"),
        ({"erase_after_sending": "no"}, "erase_after_sending"),
        ({"erase_after_sending": None}, "erase_after_sending"),
        ({"erase_after_sending": 1}, "erase_after_sending"),
    ],
)
def test_a_refusal_names_the_invalid_argument(fields: Mapping[str, Any], field: str) -> None:
    assert refusal(**fields)[0] == field


@pytest.mark.parametrize(
    ("filename", "content_type", "content", "field"),
    [
        *((name, "text/plain", b"", "filename") for name in ("", "..", " .\u00a0", "../x", "a\\b", "a/b", "a" * 256)),
        *((name, "text/plain", b"", "filename") for name in ("\uff0e\uff0e\uff0fx", "\u2024\u200b.", "a\uff3cb")),
        *((name, "text/plain", b"", "filename") for name in ("a\r\nb", "\u202efdp.exe", 7, None)),
        *(("a", wrong, b"", "content_type") for wrong in ("text", "", "text/plain\r\nX: y", "text/plain\n", None)),
        *(("a", wrong, b"", "content_type") for wrong in ("a/b; charset=utf-8", "Multipart/mixed", "message/rfc822")),
        *(("a", "text/plain", wrong, "content") for wrong in ("text", bytearray(b"x"), None)),
    ],
)
def test_an_invalid_attachment_cannot_be_made(filename: Any, content_type: Any, content: Any, field: str) -> None:
    with pytest.raises(InvalidEmail) as caught:
        Attachment(filename, content_type, content)

    assert caught.value.field == field


def test_an_unchecked_file_is_refused_as_an_attachment() -> None:
    assert refusal(attachments=[OutgoingAttachment("../x", "a/b", b"")]) == ("attachments[0]", "must be an Attachment")


@pytest.mark.parametrize(
    "text",
    ["ann@example.org, bob@example.org", "Ann <ann@example.org>;bob@example.org", "a@x.org,b@x.org,c@x.org," * 1000],
)
def test_several_addresses_in_one_string_are_refused_with_a_hint(text: str) -> None:
    reason = "has several addresses in one string; give a list of addresses"

    assert refusal(to=text) == ("to", reason)
    assert refusal(to=["ann@example.org"], cc=["ann@example.org", text]) == ("cc[1]", reason)


def test_a_comma_in_a_display_name_does_not_count_as_a_list() -> None:
    assert an_email(to='"Doe, Ann (a@b, c@d)" <ann@example.org>').to == ('"Doe, Ann (a@b, c@d)" <ann@example.org>',)
    assert refusal(to="Doe, Ann <ann@example.org>")[1].endswith("put the name in double quotes")


def test_an_email_with_erase_after_sending_is_stored_with_the_mark_among_its_tags() -> None:
    full = [str(number) for number in range(rules.MAX_TAGS)]
    plain, erased = an_email(tags=full), an_email(tags=full, erase_after_sending=True)

    assert (plain.erase_after_sending, plain.stored_tags) == (False, tuple(full))
    assert (erased.erase_after_sending, erased.stored_tags) == (True, (*full, "one_time_code"))
    assert erased.tags == tuple(full)


def test_the_tag_of_earlier_releases_sets_erase_after_sending() -> None:
    tagged = an_email(tags=["one_time_code", "login"])

    assert (tagged.erase_after_sending, tagged.stored_tags) == (True, ("one_time_code", "login"))


@pytest.mark.parametrize(
    "name",
    [
        *("From", "SENDER", "to", "Cc", "Bcc", "Reply-To", "Subject", "Date", "Message-ID", "MIME-Version"),
        *("Content-Type", "content-transfer-encoding", "Return-Path", "Received", "DKIM-Signature", "Resent-To"),
        *("ARC-Seal", "Authentication-Results", "X-SG-EID", "X-Envelope-From", "Apparently-To"),
    ],
)
def test_a_header_that_we_or_mail_servers_write_cannot_be_set(name: str) -> None:
    assert refusal(headers={name: "x"}) == (
        f"headers.{name}",
        "cannot be set, because the dispatcher or a mail server writes it",
    )
    assert refusal(headers={name: "x"}, allowed_headers=[name])[0] == f"headers.{name}"


@pytest.mark.parametrize(
    ("name", "who"),
    [
        *(("X-MC-Subaccount", "Mailchimp Transactional"), ("X-MSYS-API", "SparkPost"), ("x-smtpapi", "SendGrid")),
        *(("X-Mailgun-Drop-Message", "Mailgun"), ("X-PM-Message-Stream", "Postmark"), ("X-Job", "PowerMTA")),
        *(("X-SES-SOURCE-ARN", "Amazon SES"), ("X-MS-Exchange-Organization-SCL", "Microsoft Exchange")),
        *(("X-MJ-TemplateID", "Mailjet"), ("X-Sib-Sandbox", "Brevo"), ("TLS-Required", "mail servers")),
    ],
)
def test_a_header_that_controls_a_provider_must_be_allowed_by_name(name: str, who: str) -> None:
    reason = f"controls {who}; to allow it, add its name to DISPATCHER_ALLOWED_PROVIDER_HEADERS"

    assert refusal(headers={name: "x"}) == (f"headers.{name}", reason)
    assert refusal(headers={name: "x"}, template_id="d-1", text=None) == (f"headers.{name}", reason)
    assert refusal(headers={name: "x"}, allowed_headers=[name[:-1], f"{name[:-1]}*", "X-MC-Tags"])[1] == reason
    assert an_email(headers={name: "x"}, allowed_headers=[name.swapcase()]).headers == {name: "x"}


def test_the_headers_that_applications_need_can_be_set() -> None:
    useful = {
        "In-Reply-To": "<17@example.com>",
        "References": "<16@example.com> <17@example.com>",
        "List-Unsubscribe": "<https://example.com/u/17>, <mailto:u@example.com>",
        "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
        "Auto-Submitted": "auto-generated",
        **dict.fromkeys(("X-Priority", "X-Mailer", "X-MSMail-Priority", "X-Mailing-List", "X-Campaign", "X-Tag"), "x"),
        **dict.fromkeys(("X-Entity-Ref-ID", "X-Auto-Response-Suppress", "Feedback-ID", "BIMI-Selector"), "x"),
        "X-Order": "Größe 👨\u200d👩\u200d👧 \u2068שרה\u2069",
    }

    assert an_email(headers=useful).headers == useful


def test_values_at_their_limits_are_accepted() -> None:
    email = an_email(
        message_key="ü" * MAX_KEY_CHARACTERS,
        tenant_id="t" * MAX_TENANT_CHARACTERS,
        to=["ann@example.org"] * rules.MAX_RECIPIENTS,
        subject="s" * rules.MAX_LINE_CHARACTERS,
        text="ü" * (rules.MAX_BODY_OCTETS // 4),
        html="h" * (rules.MAX_BODY_OCTETS // 2),
        headers={f"X-{number:074}": "v" * rules.MAX_LINE_CHARACTERS for number in range(rules.MAX_HEADERS)},
        attachments=[Attachment("f" * 255, "a/b", bytes(rules.MAX_ATTACHMENT_OCTETS // 100))] * rules.MAX_ATTACHMENTS,
        tags=[str(number) * 100 for number in range(rules.MAX_TAGS)],
    )

    assert len(email.headers) == 100


def test_one_body_may_use_the_whole_size_limit() -> None:
    largest = "h" * rules.MAX_BODY_OCTETS

    assert an_email(text=None, html=largest).html == largest
    assert refusal(text=None, html=largest + "h")[0] == "html"


def test_punctuation_that_resembles_an_encoded_word_is_accepted() -> None:
    assert an_email(subject="1+1=? Tell me (why?=) now").subject == "1+1=? Tell me (why?=) now"


@given(
    field=st.sampled_from(
        ["message_key", "sender", "subject", "text", "tenant_id", "correlation_id", "tags", "to", "headers"]
    ),
    junk=st.text(max_size=20),
)
@settings(deadline=None)
def test_a_refusal_never_quotes_the_value(field: str, junk: str) -> None:
    secret = f"xqzj\n\0{junk}"
    value: object = {"X-A": secret} if field == "headers" else [secret] if field in ("tags", "to") else secret

    named, reason = refusal(**{field: value})

    assert "xqzj" not in named + reason


@pytest.mark.parametrize(
    "message",
    [
        Email(message_key="k", sender="a@example.com", to="b@example.com", text="Hello", headers={"X-Order": "1"}),
        Email(message_key="k", sender="a@example.com", to="b@example.com", template_id="t", template_data={"a": [1]}),
        Sms(message_key="k", to="+4915112345678", text="Hello"),
    ],
)
def test_a_message_can_be_pickled_and_copied(message: Message) -> None:
    for copied in (pickle.loads(pickle.dumps(message)), copy.copy(message), copy.deepcopy(message)):  # noqa: S301
        assert copied == message
        assert copied.payload_hash() == message.payload_hash()
        assert type(copied.headers) is type(message.headers)
    assert dataclasses.asdict(message)["headers"] == message.headers


class Welcome(Email):
    """A class of an application, with a constructor of its own."""

    def __init__(self, recipient: str) -> None:
        super().__init__(message_key=f"welcome {recipient}", sender="a@example.com", to=recipient, text="Welcome")


class Code(Sms):
    def __init__(self, number: str, **options: Any) -> None:
        super().__init__(message_key=f"code {number}", to=number, text="1234", **options)


def test_an_application_can_derive_classes_with_other_constructors() -> None:
    welcome, code = Welcome("b@example.com"), Code("+4915112345678", sender="Shop")

    assert (welcome.to, welcome.text, welcome.message_key) == (("b@example.com",), "Welcome", "welcome b@example.com")
    assert (code.to, code.text, code.sender) == (("+4915112345678",), "1234", "Shop")
