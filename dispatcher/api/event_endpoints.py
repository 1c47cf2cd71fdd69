"""The endpoints to which providers post events. A request needs no API key: its signature authenticates it.

All providers together count as one caller, with one caller's limits for requests and memory. So forged requests cannot
displace the clients that enqueue emails. Each configured provider has an equal share of these limits. So requests that
are forged in the name of one provider cannot displace those of the others. A response is sent after the events are
committed, and never shows whether an email exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from dispatcher.admission.off_loop import run_off_loop
from dispatcher.admission.problems import Problem
from dispatcher.api.body_reader import BodyReader
from dispatcher.api.face import Endpoint
from dispatcher.api.operation import BODY_PROBLEMS, Operation
from dispatcher.config import Settings
from dispatcher.domain.accounts import account_of
from dispatcher.domain.suppression import Reply
from dispatcher.events import resend, sendgrid, ses, twilio
from dispatcher.events.contract import EventSink, EventsRefused, EventsUnreadable, ParsedEvents, SourceUnavailable
from dispatcher.events.intake import report_refusal, report_skipped
from dispatcher.events.resend import ResendVerifier
from dispatcher.events.sendgrid import SendGridVerifier
from dispatcher.events.sns import MessageType, SnsVerifier, fetcher
from dispatcher.events.sns_certificates import Fetch
from dispatcher.events.twilio import TwilioVerifier
from dispatcher.ops.suppressions import opt_in, opt_out
from dispatcher.providers.twilio import TwilioSettings
from dispatcher.store.connections import Pool
from dispatcher.telemetry.log import get_log

MAX_BODY_BYTES: Final = 4 << 20
"""The size of the largest body that is accepted. SendGrid posts up to 768 kB."""
MAX_SNS_BYTES: Final = 1 << 20
"""The size of the largest message of Amazon SNS that is accepted. Amazon SNS posts up to 256 KiB of text, which is
escaped and wrapped in JSON. A message is parsed before its signature can be verified, so a forged one costs as much."""
MAX_RESEND_BYTES: Final = 256 << 10
"""The size of the largest event of Resend that is accepted. It has an email's addresses and subject, but no content."""
MAX_FORM_BYTES: Final = 64 << 10
"""The size of the largest form of Twilio that is accepted. The longest SMS, with each character escaped, has 20 KB."""
_BYTES_PER_ESCAPE: Final = 16
"""How many other bytes of a form are parsed in the time of one escape, such as `%41`."""

SHARE: Final = "provider events"
"""The caller of the API as which all providers together count."""
_PROBLEMS: Final = ("signature-invalid", "signature-stale", *BODY_PROBLEMS)


def _signature_header(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": True, "schema": {"type": "string"}, "description": description}


RECEIVE_SENDGRID: Final = Operation(
    name="receive_sendgrid_events",
    summary="Receive SendGrid's events",
    description="For SendGrid's signed event webhook. The API responds after the events are committed, and never shows "
    "whether an email exists.",
    status=204,
    response_schema=None,
    request_schema="SendGridEvents",
    schemas={"SendGridEvents": {"type": "array", "items": {"type": "object"}}},
    example=[{"event": "delivered", "email_id": "01938a7e-8f3c-7d42-9c51-2f6d1f0e9a77", "timestamp": 1764000000}],
    parameters=(
        _signature_header("X-Twilio-Email-Event-Webhook-Signature", "ECDSA over the timestamp and the raw body."),
        _signature_header("X-Twilio-Email-Event-Webhook-Timestamp", "When the request was signed, in Unix seconds."),
    ),
    problems=_PROBLEMS,
    needs_key=False,
)
RECEIVE_RESEND: Final = Operation(
    name="receive_resend_events",
    summary="Receive Resend's events",
    description="For Resend's webhooks. The API responds after the event is committed, and never shows whether an "
    "email exists.",
    status=204,
    response_schema=None,
    request_schema="ResendEvent",
    schemas={"ResendEvent": {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}},
    example={
        "type": "email.delivered",
        "created_at": "2026-11-23T12:00:00.000Z",
        "data": {"to": ["ann@example.org"], "tags": {"email_id": "01938a7e-8f3c-7d42-9c51-2f6d1f0e9a77"}},
    },
    parameters=(
        _signature_header(resend.ID_HEADER, "The id of the message, the same in each retry."),
        _signature_header(resend.TIMESTAMP_HEADER, "When the request was signed, in Unix seconds."),
        _signature_header(resend.SIGNATURE_HEADER, "`v1,` and the HMAC over id, timestamp and raw body."),
    ),
    problems=_PROBLEMS,
    needs_key=False,
)
RECEIVE_SES: Final = Operation(
    name="receive_ses_events",
    summary="Receive Amazon SES's events from Amazon SNS",
    description="For HTTPS subscriptions of the topics in DISPATCHER_SES_EVENTS_TOPICS. The API confirms the "
    "subscriptions itself. The body may have any media type.",
    status=204,
    response_schema=None,
    request_schema="SnsMessage",
    schemas={
        "SnsMessage": {
            "type": "object",
            "required": ["Type", "TopicArn", "Message"],
            "properties": {
                "Type": {"enum": ["Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"]},
                "SignatureVersion": {"enum": ["1", "2"]},
            },
        }
    },
    example={"Type": "Notification", "TopicArn": "arn:aws:sns:eu-west-1:123456789012:ses-events", "Message": "{…}"},
    problems=("topic-forbidden", *_PROBLEMS, "provider-unavailable"),
    needs_key=False,
)
RECEIVE_TWILIO: Final = Operation(
    name="receive_twilio_status",
    summary="Receive Twilio's status callbacks",
    description="Twilio posts a form for each change of an SMS's status. The signature covers the URL, so Twilio "
    "must post to DISPATCHER_TWILIO_CALLBACK_URL. The API responds after the event is committed, and never shows "
    "whether the SMS exists.",
    status=204,
    response_schema=None,
    request_schema="TwilioForm",
    example={"MessageSid": f"SM{'0' * 32}", "MessageStatus": "delivered", "To": "+4915112345678"},
    parameters=(
        _signature_header("X-Twilio-Signature", "HMAC over the URL and the form's fields, with the auth token."),
    ),
    schemas={"TwilioForm": {"type": "object", "required": ["MessageSid"], "additionalProperties": {"type": "string"}}},
    problems=_PROBLEMS,
    needs_key=False,
)
RECEIVE_TWILIO_SMS: Final = replace(
    RECEIVE_TWILIO,
    name="receive_twilio_sms",
    summary="Receive SMS from recipients",
    description="Twilio posts a form for each SMS to one of your numbers. STOP suppresses the number for every tenant "
    "that has sent it an SMS, and START ends the suppression. The API does nothing else with the SMS.",
    example={"MessageSid": f"SM{'0' * 32}", "From": "+4915112345678", "Body": "STOP"},
)


_Signature = TypeVar("_Signature")


class _Verifier(Protocol[_Signature]):
    """Verifies requests whose headers have a signature of the body."""

    def check_headers(self, headers: Mapping[str, str], /) -> _Signature: ...

    def verify(self, given: _Signature, body: bytearray, /) -> None: ...


class EventEndpoints:
    """Verifies, parses and stores the events that the configured providers post."""

    def __init__(
        self, settings: Settings, bodies: BodyReader, sink: EventSink, fetch: Fetch | None, pool: Pool
    ) -> None:
        """`fetch` requests a URL of Amazon SNS, to get a certificate or to confirm a subscription; by default, over the
        network. `pool` stores suppressions, because a recipient who answers an SMS with STOP is suppressed, and
        certificates."""
        self.bodies = bodies
        self.sink = sink
        self.pool = pool
        seconds = settings.events_max_age_seconds
        self.sendgrid = {
            name: SendGridVerifier(keys, max_age_seconds=seconds)
            for name, keys in settings.verifies_events(sendgrid.NAME).items()
        }
        # A topic of the provider itself counts for all accounts, so it comes last.
        listed = reversed(settings.verifies_events(ses.NAME).items())
        self.topics = {topic: name for name, topics in listed for topic in topics}
        self.sns: SnsVerifier | None = None
        if self.topics:
            fetch = fetch or fetcher(settings.ca_file)
            self.sns = SnsVerifier(self.topics, max_age_seconds=seconds, fetch=fetch, source=pool)
        self.resend = {
            name: ResendVerifier(secrets, max_age_seconds=seconds)
            for name, secrets in settings.verifies_events(resend.NAME).items()
        }
        self.twilio: TwilioVerifier | None = None
        own = settings.own.get(twilio.NAME)
        if isinstance(own, TwilioSettings) and own.callback_url is not None and own.auth_token:
            self.twilio = TwilioVerifier((own.auth_token, *own.webhook_secrets))
            self.twilio_url = own.callback_url

    @property
    def routes(self) -> list[tuple[str, Endpoint, Operation]]:
        found: list[tuple[str, Endpoint, Operation]] = []
        if self.sendgrid:
            found.append(("/v1/events/sendgrid", self.receive_sendgrid, RECEIVE_SENDGRID))
        if self.resend:
            found.append(("/v1/events/resend", self.receive_resend, RECEIVE_RESEND))
        if self.sns is not None:
            found.append(("/v1/events/ses", self.receive_ses, RECEIVE_SES))
        if self.twilio is not None:
            found.append(("/v1/events/twilio", self.receive_twilio, RECEIVE_TWILIO))
            found.append(("/v1/inbound/twilio", self.receive_twilio_sms, RECEIVE_TWILIO_SMS))
        return found

    async def receive_sendgrid(self, request: Request) -> Response:
        return await self._receive_signed(request, sendgrid.NAME, self.sendgrid, sendgrid.parse, MAX_BODY_BYTES)

    async def receive_resend(self, request: Request) -> Response:
        return await self._receive_signed(request, resend.NAME, self.resend, resend.parse, MAX_RESEND_BYTES)

    async def _receive_signed(
        self,
        request: Request,
        provider: str,
        verifiers: Mapping[str, _Verifier[_Signature]],
        parse: Callable[[bytearray], ParsedEvents],
        max_bytes: int,
    ) -> Response:
        """`verifiers`: by provider or account. The first that verifies the signature has sent the events."""
        with _as_problems(provider):
            signature = next(iter(verifiers.values())).check_headers(request.headers)

            def verified(body: bytearray) -> ParsedEvents:
                *others, last = verifiers
                for name in others:
                    with suppress(EventsRefused):
                        verifiers[name].verify(signature, body)
                        return _of_account(parse(body), name)
                verifiers[last].verify(signature, body)
                return _of_account(parse(body), last)

            async with self.bodies.read(request, provider, max_bytes=max_bytes) as body:
                await self._store(provider, await run_off_loop(len(body), lambda: verified(body)))
        return Response(status_code=204)

    async def receive_ses(self, request: Request) -> Response:
        assert self.sns is not None
        with _as_problems(ses.NAME):
            async with self.bodies.read(request, ses.NAME, max_bytes=MAX_SNS_BYTES) as body:
                message = await self.sns.verify(body)
                match message.type:
                    case MessageType.NOTIFICATION:
                        name = self.topics[message.topic]
                        await self._store(name, _of_account(ses.parse_text(message.text), name))
                    case MessageType.SUBSCRIPTION:
                        await self.sns.confirm(message)
                        get_log().info("events.subscription_confirmed", topic=message.topic)
                    case MessageType.UNSUBSCRIPTION:
                        get_log().warning("events.subscription_ended", topic=message.topic)
        return Response(status_code=204)

    async def receive_twilio(self, request: Request) -> Response:
        with _as_problems(twilio.NAME):
            form = await self._twilio_form(request, self.twilio_url)
            await self._store(twilio.NAME, twilio.parse_status(request.query_params.get("email_id", ""), form))
        return Response(status_code=204)

    async def receive_twilio_sms(self, request: Request) -> Response:
        """Reads an SMS from a recipient: STOP suppresses the recipient's number, START ends the suppression."""
        with _as_problems(twilio.NAME):
            base_url = self.twilio_url.removesuffix("/").removesuffix("/events/twilio")
            form = await self._twilio_form(request, f"{base_url}/inbound/twilio")
            sms = twilio.parse_inbound(form)
            if sms is not None and sms.reply is not None:
                change = opt_out if sms.reply is Reply.STOP else opt_in
                await change(self.pool, sms.number, sms.message_id)
        # The response has no content: Twilio would send the content to the recipient as an SMS.
        return Response("<Response/>", media_type="text/xml")

    async def _twilio_form(self, request: Request, url: str) -> dict[str, str]:
        verifier = self.twilio
        assert verifier is not None
        if request.url.query:
            url = f"{url}?{request.url.query}"
        signature = verifier.check_headers(request.headers)
        async with self.bodies.read(request, twilio.NAME, max_bytes=MAX_FORM_BYTES) as body:
            size = len(body) + _BYTES_PER_ESCAPE * body.count(b"%")
            return await run_off_loop(size, lambda: verifier.verify(signature, url, body))

    async def _store(self, provider: str, parsed: ParsedEvents) -> None:
        await self.sink.store(parsed.events)
        report_skipped(provider, parsed)


def _of_account(parsed: ParsedEvents, name: str) -> ParsedEvents:
    """The events, as events of the account whose keys have verified them."""
    if not account_of(name):
        return parsed
    return replace(parsed, events=[replace(event, provider=name) for event in parsed.events])


@contextmanager
def _as_problems(provider: str) -> Iterator[None]:
    """Turns exceptions about a provider's events into problems for the response, and counts refused requests."""
    try:
        yield
    except EventsRefused as error:
        report_refusal(provider, error.refusal)
        # Close the connection, because the body may be unread.
        raise Problem(error.refusal.value, error.detail, closes=True) from None
    except EventsUnreadable as error:
        raise Problem("malformed-json", str(error)) from None
    except SourceUnavailable as error:
        get_log().warning("events.source_unavailable", provider=provider, reason=error.message, retry_in_seconds=None)
        raise Problem("provider-unavailable", "Retry the request.", retry_after=20) from None
