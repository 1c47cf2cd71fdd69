"""The provider `ses`: Amazon SES v2 over our own HTTP transport.

request    the parameters of SendEmail for one email, or of SendBulkEmail for several
responses  the outcome of each response
endpoint   SES's URL, as botocore resolves it
signing    credentials, which botocore finds and renews, and the request's signature

botocore also parses SES's errors. We do not send with botocore's client, because it blocks a thread per request, takes
ten times as much CPU, and raises exceptions that do not say whether a request was sent.

Loading botocore takes 200 ms and 20 MB. So botocore is loaded only if this provider is configured. The parent loads it
before the fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.address import MAX_LOCAL_OCTETS
from dispatcher.domain.capabilities import Capabilities, Requirement
from dispatcher.domain.outcome import Concern, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.contract import Attempt, BulkCallRefused, BulkEntry, SendAgain
from dispatcher.providers.http_provider import CHECK_SECONDS
from dispatcher.providers.ses.request import (
    LIMITS,
    MAX_OCTETS,
    MAX_RECIPIENTS,
    bulk_entry_of,
    bulk_request_for,
    request_for,
)
from dispatcher.providers.ses.responses import (
    NAME,
    bulk_outcomes_of,
    credentials_fault,
    is_denied,
    outcome_of,
    refusal_of,
    refuses_credentials,
    unsent_outcome,
)
from dispatcher.transport.body import Body, sha256_of
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.transport.mime import LARGE_OCTETS
from dispatcher.transport.mime_headers import UnrenderableEmail

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

    from dispatcher.providers.ses.signing import Signer

_REACH: Final = "Check the network and AWS_REGION."
_CONSOLE: Final = "See the SES console."
_MORE: Final = "Wait, or ask AWS for a higher quota."
_SANDBOX: Final = " The account is in the sandbox: SES delivers to verified addresses only."


@dataclass(frozen=True, slots=True, kw_only=True)
class SesSettings(ProviderSettings):
    """The settings of the ses provider. They do not include the credentials, which botocore finds."""

    region: str | None = setting(
        values.name("a-z0-9-"),
        None,
        "SES's region, such as eu-west-1; default: AWS_DEFAULT_REGION, or the AWS profile's region.",
        variable="AWS_REGION",
    )
    configuration_set: str | None = setting(
        values.name("A-Za-z0-9_-"), None, "SES's configuration set for every email."
    )
    endpoint_url: str | None = setting(
        values.endpoint, None, "URL of SES, if it is not the region's own: https://host."
    )
    connections: int = setting(
        values.whole(1, 256), "64", "Concurrent requests of one worker to SES, at most; each takes a connection."
    )

    def max_connections(self, _settings: Settings, /) -> int:
        return self.connections


def region_of(own: SesSettings) -> str:
    """The region of SES, from our or botocore's settings. Raises ConfigurationError if neither sets one."""
    from dispatcher.providers.ses.endpoint import default_region

    region = own.region or default_region()
    if region is None:
        raise ConfigurationError(
            ["AWS_REGION is not set, and the provider ses needs it: set it to SES's region, such as eu-west-1."]
        )
    return region


class SesProvider:
    name = NAME
    capabilities = Capabilities(
        copies=2,
        templates=True,
        inline_parts=True,
        calendar=True,
        raw_mime=True,
        smtputf8=False,
        max_recipients=MAX_RECIPIENTS,
        max_octets=MAX_OCTETS,
        max_local_octets=MAX_LOCAL_OCTETS,
        refuses=(Requirement.TEMPLATE_HEADERS,),
    )
    settings = SesSettings
    limits = LIMITS

    def __init__(self, own: SesSettings, *, ca_file: Path | None = None) -> None:
        """Does not connect: the first email starts the search for credentials. `ca_file`: instead of botocore's."""
        from dispatcher.providers.ses.endpoint import endpoint_of, new_session
        from dispatcher.providers.ses.signing import AwsCredentials

        session = new_session()
        self._configuration_set = own.configuration_set
        self._endpoint = endpoint_of(session, own.region, own.endpoint_url, ca_file)
        self._credentials = AwsCredentials(session)
        self._transport = HttpTransport(
            connections=own.connections, trusted=self._endpoint.trusted, proxy=self._endpoint.proxy
        )
        self._signer: Signer | None = None
        self._send_url = self._endpoint.url_of("SendEmail")
        self._bulk_url = self._endpoint.url_of("SendBulkEmail")
        self._account_url = self._endpoint.url_of("GetAccount")
        self._headers = {
            "Content-Type": "application/json",
            "Host": self._endpoint.host,
            "User-Agent": self._endpoint.user_agent,
        }

    @classmethod
    def open(cls, settings: Settings) -> SesProvider:
        own = settings.of(SesSettings)
        return cls(replace(own, region=region_of(own)), ca_file=settings.ca_file)

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        build = partial(request_for, email, self._configuration_set)
        try:
            with attempt.rendering:
                octets = len(email.text or "") + len(email.html or "")
                request = build() if octets < LARGE_OCTETS else await asyncio.to_thread(build)
                body = request.body
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        result = await self._post(self._send_url, body, attempt)
        return _outcome(email, result) if isinstance(result, HttpResponse) else result

    def begin(self, email: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        is_large = (
            email.attachments
            or email.calendar
            or email.raw
            or len(email.text or "") + len(email.html or "") >= LARGE_OCTETS
        )
        if is_large or not self._transport.idle or (credentials := self._credentials.current()) is None:
            return None
        with attempt.rendering:
            body = bytes(request_for(email, self._configuration_set).body)
        headers = self._signed(credentials, "POST", self._send_url, sha256(body).hexdigest())
        answered = partial(self._answered, email, credentials)
        return self._transport.begin(self._send_url, headers, body, attempt, answered)

    def _answered(
        self, email: OutgoingEmail, credentials: ReadOnlyCredentials, result: HttpResponse | NoResponse
    ) -> Outcome:
        if isinstance(result, NoResponse):
            return result.outcome
        if refuses_credentials(result):
            self._credentials.discard(credentials)
            raise SendAgain
        return _outcome(email, result)

    def bulk_entry_of(self, email: OutgoingEmail) -> BulkEntry | None:
        return bulk_entry_of(email)

    async def send_bulk(
        self, parts: Sequence[BulkEntry], attempt: Attempt
    ) -> Sequence[Outcome | ProviderFault] | BulkCallRefused:
        request = bulk_request_for(parts, self._configuration_set)
        result = await self._post(self._bulk_url, request.body, attempt)
        return bulk_outcomes_of(result, len(parts)) if isinstance(result, HttpResponse) else [result] * len(parts)

    async def check(self) -> str:
        """A report about the account for `dispatcher doctor`; sends no email."""
        deadline = asyncio.get_running_loop().time() + CHECK_SECONDS
        url = self._account_url
        try:
            credentials = await self._signing_credentials(deadline)
            headers = self._signed(credentials, "GET", url, await sha256_of(b""))
            response = await self._transport.get(url, headers, deadline)
        except TimeoutError as error:
            words = f"AWS credentials were not found within {CHECK_SECONDS:g} s."
            remedy = "Check that no firewall blocks the server that issues them, such as the metadata service."
            raise ProviderFault(NAME, words, remedy=remedy) from error
        except (RequestNotSent, NoResponse) as error:
            outcome = unsent_outcome(error) if isinstance(error, RequestNotSent) else error.outcome
            raise ProviderFault(NAME, f"SES cannot be used: {outcome.detail}.", remedy=_REACH) from error
        return self._report(response)

    async def close(self) -> None:
        await self._transport.close()

    async def _post(self, url: str, body: bytes | Body, attempt: Attempt) -> HttpResponse | Deferred | Uncertain:
        """Sends a signed POST. Returns SES's response; without a response, the outcome."""
        digest = await sha256_of(body)
        try:
            credentials = await self._signing_credentials(attempt.deadline)
            # We sign the request only when a connection is free, because AWS rejects a signature that is minutes old.
            headers = partial(self._signed, credentials, "POST", url, digest)
            response = await self._transport.post(url, headers, body, attempt)
            if not refuses_credentials(response):
                return response
            # SES has accepted nothing. The credentials may have been replaced before the time that botocore knows.
            attempt.mark_not_sent()
            self._credentials.discard(credentials)
            renewed = await self._signing_credentials(attempt.deadline)
            if renewed == credentials:
                return response
            return await self._transport.post(url, partial(self._signed, renewed, "POST", url, digest), body, attempt)
        except TimeoutError:
            words = "the deadline passed before AWS credentials were found"
            return Deferred(Reason.TIMEOUT_BEFORE_SEND, words, known_concern=Concern.PROVIDER)
        except RequestNotSent as error:
            return unsent_outcome(error)
        except NoResponse as error:
            return error.outcome

    async def _signing_credentials(self, deadline: float) -> ReadOnlyCredentials:
        if found := self._credentials.current():
            return found
        try:
            return await self._credentials.wait(deadline)
        except TimeoutError:
            raise
        except Exception as error:
            raise credentials_fault(error) from error

    def _signed(self, credentials: ReadOnlyCredentials, method: str, url: str, digest: str) -> dict[str, str]:
        """The headers of a signed request, by renewed credentials if there are any. `digest`: the body's SHA-256."""
        credentials = self._credentials.current() or credentials
        if self._signer is None or self._signer.credentials is not credentials:
            from dispatcher.providers.ses.signing import Signer

            self._signer = Signer(credentials, self._endpoint.signing_name, self._endpoint.region, self._headers)
        headers = self._signer.sign(method, url, digest)
        del headers["Host"]  # the transport adds the header Host itself
        return headers

    def _report(self, response: HttpResponse) -> str:
        """The report for `dispatcher doctor`, from SES's answer about the account."""
        if is_denied(response):
            return "SES answers; these credentials may not read the account's state (ses:GetAccount)."
        if response.status >= 300:
            outcome = refusal_of(response)
            raise ProviderFault(NAME, f"SES cannot be used: {outcome.detail}.", remedy=_REACH)
        account = response.document
        if "SendingEnabled" not in account:
            raise ProviderFault(NAME, "the endpoint is not SES v2.", remedy="Check DISPATCHER_SES_ENDPOINT_URL.")
        if not account["SendingEnabled"]:
            raise ProviderFault(NAME, "SES has disabled sending for this account.", remedy=_CONSOLE)
        quota = account.get("SendQuota", {})
        most, sent, rate = (quota.get(name, 0) for name in ("Max24HourSend", "SentLast24Hours", "MaxSendRate"))
        if 0 < most <= sent:
            raise ProviderFault(NAME, f"SES's quota of {most:,.0f} emails per day is used up.", remedy=_MORE)
        place = "" if account.get("ProductionAccessEnabled") else _SANDBOX
        if not quota:
            return f"SES in {self._endpoint.region} answers: quota unknown.{place}"
        limits = f"{rate:g} emails per second, {sent:,.0f} of {most:,.0f} sent in 24 hours"
        return f"SES in {self._endpoint.region} answers: {limits}.{place}"


def _outcome(email: OutgoingEmail, response: HttpResponse) -> Outcome:
    return outcome_of(response, has_template=email.template_id is not None, sender=email.sender)


PROVIDER: Final = SesProvider
