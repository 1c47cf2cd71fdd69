"""Verifies and parses Twilio's requests: status callbacks, and SMS that recipients send to our numbers.

Twilio signs the URL and the form's fields. The signature contains no time, so a copy of an old request has a valid
signature. Such a copy changes nothing: a status that is already stored is a duplicate, and an SMS that was already
handled is recognised by its SID (Twilio's id of the SMS).

Sources: https://www.twilio.com/docs/usage/security,
https://www.twilio.com/docs/messaging/guides/track-outbound-message-status and the RequestValidator of Twilio's SDK.
"""

from __future__ import annotations

import hmac
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from dispatcher.domain.event import ProviderEvent
from dispatcher.domain.suppression import Reply, reply_in
from dispatcher.events import fields
from dispatcher.events.contract import EventsRefused, EventsUnreadable, ParsedEvents, Refusal, Skipped
from dispatcher.events.signatures import decode
from dispatcher.providers.twilio.statuses import KINDS, NUMBER, OPTED_OUT, SID, event_of

NAME: Final = "twilio"
SIGNATURE_HEADER: Final = "X-Twilio-Signature"
SETTINGS_HEADER: Final = "X-Twilio-Webhooks-Signature-Settings"
"""The header that names the key and the algorithm of the signature: `key=…,algorithm=HMAC_SHA256`. Without this header,
Twilio signs with the auth token and SHA-1."""
MAX_FIELDS: Final = 200
_ALGORITHMS: Final = {"HMAC_SHA1": ("sha1", 20), "HMAC_SHA256": ("sha256", 32)}
"""The algorithm, and how many bytes its signatures have."""
_BROKEN_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_IGNORED: Final = frozenset({"scheduled", "receiving", "received", "partially_delivered"})


@dataclass(frozen=True, slots=True)
class TwilioSignature:
    """The signature of a request: well-formed, but not yet verified."""

    octets: bytes
    algorithm: str


class TwilioVerifier:
    def __init__(self, secrets: Sequence[str]) -> None:
        """`secrets`: the account's auth token, and the secrets of its shared keys for webhooks."""
        self._secrets = [secret.encode() for secret in secrets]

    def check_headers(self, headers: Mapping[str, str]) -> TwilioSignature:
        """Returns the signature. Call this before the body is read, so that a forged request costs little."""
        given = headers.get(SIGNATURE_HEADER, "")
        if not given:
            raise EventsRefused(Refusal.SIGNATURE, "The request has no signature.")
        octets, settings = decode(given), headers.get(SETTINGS_HEADER, "").replace(" ", "")
        named = dict(part.partition("=")[::2] for part in settings.split(","))
        algorithm, length = _ALGORITHMS.get(named.get("algorithm", "").upper() or "HMAC_SHA1", ("", 0))
        if not algorithm:
            raise EventsRefused(Refusal.SIGNATURE, "The signature's algorithm is not known.")
        if len(octets) != length:
            raise EventsRefused(Refusal.SIGNATURE, "The signature has the wrong length for its algorithm.")
        return TwilioSignature(octets, algorithm)

    def verify(self, given: TwilioSignature, url: str, body: bytes | bytearray) -> dict[str, str]:
        """Verifies a request to the public URL, with its query, and returns the fields of its form.

        Proxies change the URL of a request, so the public URL comes from a setting. Raises EventsRefused if no secret
        has signed the request, and EventsUnreadable if the body is not a form.
        """
        form = _form(body)
        signed = "".join(name + value for name, value in sorted(set(form)))
        for form_of_url in _with_and_without_port(url):
            for secret in self._secrets:
                text = (form_of_url + signed).encode("utf-8", "surrogatepass")
                if hmac.compare_digest(hmac.digest(secret, text, given.algorithm), given.octets):
                    return dict(form)
        detail = "No configured secret produces this signature for this URL. See DISPATCHER_TWILIO_CALLBACK_URL."
        raise EventsRefused(Refusal.SIGNATURE, detail)


def sign(secret: str, url: str, form: Mapping[str, str], algorithm: str = "sha1") -> str:
    """The signature of a request, as Twilio makes it."""
    text = url + "".join(name + form[name] for name in sorted(form))
    return b64encode(hmac.digest(secret.encode(), text.encode(), algorithm)).decode()


def _form(body: bytes | bytearray) -> list[tuple[str, str]]:
    with suppress(ValueError):
        if not _BROKEN_ESCAPE.search(body):  # `parse_qsl` would accept it, but take five times as long
            text = body.decode()
            return parse_qsl(text, keep_blank_values=True, strict_parsing=bool(body), max_num_fields=MAX_FIELDS)
    raise EventsUnreadable("The request is not a form.")


def _with_and_without_port(url: str) -> list[str]:
    """The URL without and with its port: Twilio may have signed either. It never signs a user and a password."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].removesuffix(f":{parts.port}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return [parts._replace(netloc=each).geturl() for each in (host, f"{host}:{port}")]


def parse_status(email_id: str, form: Mapping[str, str], *, clock: datetime | None = None) -> ParsedEvents:
    """The event of a status callback, which contains no time. Twilio's signature covers the email's id in the URL."""
    return ParsedEvents.of([_event(email_id, form, clock or datetime.now(UTC))])


def _event(email_id: str, form: Mapping[str, str], now: datetime) -> tuple[ProviderEvent] | Skipped:
    status = form.get("MessageStatus") or form.get("SmsStatus") or ""
    code = fields.text(form.get("ErrorCode")) if form.get("ErrorCode") != "0" else None
    if status not in KINDS and code != OPTED_OUT:
        return Skipped.IGNORED if status in _IGNORED else Skipped.UNKNOWN_KIND if status else Skipped.MALFORMED
    if (ours := fields.email_id(email_id)) is None:
        return Skipped.FOREIGN
    event = event_of(
        ours,
        status,
        now,
        sid=fields.text(form.get("MessageSid")) or "",
        recipient=form.get("To", ""),
        code=code,
        detail=fields.detail(form.get("ErrorMessage")),
    )
    return (event,) if event else Skipped.IGNORED


@dataclass(frozen=True, slots=True)
class InboundSms:
    message_id: str  # Twilio's id of the SMS; a repeated request has the same id
    number: str  # in E.164; must not be logged
    reply: Reply | None  # None if the SMS is neither STOP nor START


def parse_inbound(form: Mapping[str, str]) -> InboundSms | None:
    """The SMS that a request reports; None if the request reports no SMS."""
    sid, number = form.get("MessageSid", ""), form.get("From", "")
    if not SID.fullmatch(sid) or not NUMBER.fullmatch(number):
        return None
    # With Twilio's Advanced Opt-Out, `OptOutType` is STOP, START or HELP, even if the SMS is in another language.
    return InboundSms(sid, number, reply_in(form.get("OptOutType") or form.get("Body", ""), number))
