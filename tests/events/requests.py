"""Requests as providers send them: signed by keys of the tests."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import orjson
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA1, SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID
from standardwebhooks.webhooks import Webhook

from dispatcher.domain.webhook import new_secret
from dispatcher.events import resend
from dispatcher.events.contract import SourceUnavailable
from dispatcher.events.sendgrid import SIGNATURE_HEADER, TIMESTAMP_HEADER
from dispatcher.transport.http_response import HttpResponse

TOPIC: Final = "arn:aws:sns:eu-west-1:123456789012:ses-events"
CERTIFICATE_URL: Final = "https://sns.eu-west-1.amazonaws.com/SimpleNotificationService-0123456789abcdef.pem"
AT: Final = datetime(2026, 11, 23, 12, tzinfo=UTC)
ANN: Final = "ann@example.org"


class SendGridKey:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    @property
    def public(self) -> str:
        """The verification key as SendGrid shows it."""
        der = self._key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(der).decode()

    def headers(self, body: bytes, timestamp: float | None = None) -> dict[str, str]:
        seconds = str(int(time.time() if timestamp is None else timestamp))
        signature = self._key.sign(seconds.encode() + body, ec.ECDSA(SHA256()))
        return {SIGNATURE_HEADER: base64.b64encode(signature).decode(), TIMESTAMP_HEADER: seconds}


def sendgrid_event(email_id: UUID | str, event: str = "delivered", **more: Any) -> dict[str, Any]:
    return {
        "email": ANN,
        "timestamp": int(AT.timestamp()),
        "smtp-id": "<14c5d75ce93.dfd.64b469@ismtpd-555>",
        "event": event,
        "category": ["receipt"],
        "sg_event_id": "ZGVsaXZlcmVk",
        "sg_message_id": "14c5d75ce93.dfd.64b469.filter0001",
        "email_id": str(email_id),
        **more,
    }


class ResendSecret:
    """The secret of a webhook of Resend. Signs as Svix does, by the library of Standard Webhooks."""

    def __init__(self) -> None:
        self.text = new_secret()

    def headers(self, body: bytes, timestamp: float | None = None, message_id: str = "msg_2b1tXk") -> dict[str, str]:
        at = datetime.fromtimestamp(int(time.time() if timestamp is None else timestamp), UTC)
        signature = Webhook(self.text).sign(message_id, at, body.decode())
        return {
            resend.ID_HEADER: message_id,
            resend.TIMESTAMP_HEADER: str(int(at.timestamp())),
            resend.SIGNATURE_HEADER: signature,
        }


def resend_event(email_id: UUID | str | None, kind: str = "email.delivered", **more: Any) -> dict[str, Any]:
    """An event of Resend with further fields of `data`, such as `bounce={…}`."""
    data = {
        "created_at": "2026-11-23T11:59:58.894719+00:00",
        "email_id": "56761188-7520-42d8-8898-ff6fc54ce618",
        "from": "Acme <shop@example.com>",
        "to": [ANN],
        "subject": "Receipt",
        "tags": {"tag_1": "receipt", **({} if email_id is None else {"email_id": str(email_id)})},
    }
    return {"type": kind, "created_at": "2026-11-23T12:00:00.000Z", "data": {**data, **more}}


def ses_event(email_id: UUID | str | None, kind: str = "Delivery", name: str = "eventType", **facts: Any) -> Any:
    """A notice of SES with these fields, such as `bounce={…}`; `mail` is merged with the usual one."""
    mail = {
        "timestamp": "2026-11-23T12:00:00.123Z",
        "messageId": "EXAMPLE7c191be45-e9aedb9a-02f9-4d12-a87d-dd0099a07f8a-000000",
        "source": "shop@example.com",
        "destination": [ANN],
        "tags": {"ses:operation": ["SendEmail"], **({} if email_id is None else {"email_id": [str(email_id)]})},
    }
    return {name: kind, **facts, "mail": {**mail, **facts.get("mail", {})}}


def delivery(email_id: UUID | str) -> Any:
    facts = {"timestamp": "2026-11-23T12:00:01Z", "recipients": [ANN], "smtpResponse": "250 2.6.0 Message received"}
    return ses_event(email_id, delivery=facts)


@dataclass
class Sns:
    """Amazon SNS: signs messages, serves its certificate, confirms subscriptions. `fetched`: the requested URLs."""

    fetched: list[str] = field(default_factory=list)
    is_down: bool = False
    status: int = 200
    pem: bytes = b""

    def __post_init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.pem = self.certificate()

    def certificate(self, begins_at: datetime | None = None, days: int = 30) -> bytes:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sns.amazonaws.com")])
        begins_at = begins_at or datetime.now(UTC) - timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(self._key.public_key())
        builder = builder.serial_number(1).not_valid_before(begins_at).not_valid_after(begins_at + timedelta(days))
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    async def fetch(self, url: str) -> HttpResponse:
        self.fetched.append(url)
        if self.is_down:
            raise SourceUnavailable("Amazon SNS does not respond.")
        return HttpResponse(self.status, {}, self.pem if url.endswith(".pem") else b"<ConfirmSubscriptionResponse/>")

    def message(self, text: Any, *, version: str = "2", **fields: Any) -> dict[str, Any]:
        """A signed message with this text, or with an object as JSON, and other `fields`; None removes a field."""
        given = {
            "Type": "Notification",
            "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
            "TopicArn": TOPIC,
            "Message": text if isinstance(text, str) else json.dumps(text),
            "Timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "SignatureVersion": version,
            "SigningCertURL": CERTIFICATE_URL,
            **fields,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return {**given, "Signature": self.signature(given, version)}

    def subscription(self, **fields: Any) -> dict[str, Any]:
        more = {
            "Type": "SubscriptionConfirmation",
            "Token": "2336412f37fb687f5d51",
            "SubscribeURL": "https://sns.eu-west-1.amazonaws.com/?Action=ConfirmSubscription",
        }
        return self.message("You have chosen to subscribe to the topic.", **{**more, **fields})

    def signature(self, given: Mapping[str, Any], version: str) -> str:
        names = {"Message", "MessageId", "Timestamp", "TopicArn", "Type"}
        names |= {"Subject"} if given["Type"] == "Notification" else {"SubscribeURL", "Token"}
        lines = "".join(f"{name}\n{given[name]}\n" for name in sorted(names) if name in given)
        hashed = SHA1() if version == "1" else SHA256()  # noqa: S303
        return base64.b64encode(self._key.sign(lines.encode(), padding.PKCS1v15(), hashed)).decode()


def dumped(value: Any) -> bytes:
    return orjson.dumps(value)
