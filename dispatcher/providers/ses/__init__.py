"""The provider ses: Amazon SES v2 over our own transport.

request   one email as parameters of SendEmail, or several as those of SendBulkEmail
answers   what each answer means
endpoint  where SES is, as botocore has it
signing   whose credentials sign, which botocore finds and renews; and the signature, by botocore's signer

botocore also reads SES's refusals. Its own client sends nothing here: it blocks a thread per request, costs ten times
as much, and its exceptions do not say whether a request left. With its models it takes 200 ms and 20 MB, so it is
loaded only where this provider is named, and then in the parent, before the fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dispatcher.config import ProviderSettings, Settings, setting, values
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ConfigurationError, ProviderFault
from dispatcher.providers.contract import Attempt, Part, RefusedTogether
from dispatcher.providers.ses.answers import (
    NAME,
    is_denied,
    outcome_of,
    outcomes_of_call,
    refusal_of,
    unsent,
    unsigned,
)
from dispatcher.providers.ses.request import (
    LIMITS,
    MAX_OCTETS,
    MAX_RECIPIENTS,
    part_of,
    request_for,
    request_of_call,
)
from dispatcher.transport.body import Body, digest_of
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_answer import Answer, NoAnswer, NothingLeft
from dispatcher.transport.mime import LARGE_OCTETS
from dispatcher.transport.mime_headers import UnrenderableEmail

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

    from dispatcher.providers.ses.signing import Signer

CHECK_SECONDS: Final = 15.0
"""How long `check` gives credentials and SES together."""

_REACH: Final = "Is it reachable, and AWS_REGION right?"
_CONSOLE: Final = "Look into SES's console."
_MORE: Final = "Wait, or ask for more."
_SANDBOX: Final = " In the sandbox: only to addresses that are verified."


@dataclass(frozen=True, slots=True, kw_only=True)
class SesSettings(ProviderSettings):
    """What an operator can set; credentials are botocore's own business."""

    region: str | None = setting(
        values.name("a-z0-9-"),
        None,
        "SES's region, like eu-west-1; else AWS_DEFAULT_REGION's or the AWS profile's.",
        variable="AWS_REGION",
    )
    configuration_set: str | None = setting(
        values.name("A-Za-z0-9_-"), None, "SES's configuration set for every email."
    )
    endpoint_url: str | None = setting(values.endpoint, None, "Instead of SES's own address: https://host.")
    connections: int = setting(
        values.whole(1, 256), "64", "Requests that a worker has on the wire to SES at once; each takes a connection."
    )

    def most_connections(self, _settings: Settings, /) -> int:
        """See `ProviderSettings`."""
        return self.connections


def region_of(own: SesSettings) -> str:
    """SES's region.

    Raises:
        ConfigurationError: none is named anywhere.
    """
    from dispatcher.providers.ses.endpoint import default_region

    region = own.region or default_region()
    if region is None:
        raise ConfigurationError(
            ["AWS_REGION is not set, but DISPATCHER_PROVIDERS names ses: set it to SES's region, like eu-west-1."]
        )
    return region


class SesProvider:
    """Sends through SES; see `contract.Provider`."""

    name = NAME
    capabilities = Capabilities(
        copies=2, templates=True, smtputf8=False, max_recipients=MAX_RECIPIENTS, max_octets=MAX_OCTETS
    )
    settings = SesSettings
    limits = LIMITS

    def __init__(self, own: SesSettings, *, ca_file: Path | None = None) -> None:
        """An adapter without credentials and connections; they come with the first email.

        Args:
            ca_file: Certificates to trust instead of botocore's.

        Raises:
            ConfigurationError: AWS's settings, the proxy or the certificates cannot be used.
        """
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
        """See `contract.ProviderClass`."""
        own = settings.of(SesSettings)
        return cls(replace(own, region=region_of(own)), ca_file=settings.ca_file)

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt; see `contract.Provider.send`. A fault may come after `leaving`: SES took nothing."""
        build = partial(request_for, email, self._configuration_set)
        try:
            with attempt.rendering:
                octets = len(email.text or "") + len(email.html or "")
                request = build() if octets < LARGE_OCTETS else await asyncio.to_thread(build)
                body = request.body
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        told = await self._posted(self._send_url, body, attempt)
        return outcome_of(told, has_template=email.template_id is not None) if isinstance(told, Answer) else told

    def part_of(self, email: OutgoingEmail) -> Part | None:
        """See `contract.BulkProvider.part_of`."""
        return part_of(email)

    async def send_many(
        self, parts: Sequence[Part], attempt: Attempt
    ) -> Sequence[Outcome | ProviderFault] | RefusedTogether:
        """One call; see `contract.BulkProvider.send_many`."""
        request = request_of_call(parts, self._configuration_set)
        told = await self._posted(self._bulk_url, request.body, attempt)
        return outcomes_of_call(told, len(parts)) if isinstance(told, Answer) else [told] * len(parts)

    async def check(self) -> str:
        """What SES says of the account, for `dispatcher doctor`; sends nothing.

        Raises:
            ProviderFault: SES cannot be used, now or before somebody mends something.
        """
        deadline = asyncio.get_running_loop().time() + CHECK_SECONDS
        url = self._account_url
        try:
            credentials = await self._signing_credentials(deadline)
            headers = self._signed(credentials, "GET", url, await digest_of(b""))
            answer = await self._transport.get(url, headers, deadline)
        except TimeoutError as error:
            raise ProviderFault(
                NAME, f"there were no credentials within {CHECK_SECONDS:g} s.", remedy="Is a firewall in between?"
            ) from error
        except (NothingLeft, NoAnswer) as error:
            outcome = unsent(error) if isinstance(error, NothingLeft) else error.outcome
            raise ProviderFault(NAME, f"SES: {outcome.detail}.", remedy=_REACH) from error
        return self._praise(answer)

    async def close(self) -> None:
        """Ends the connections."""
        await self._transport.close()

    async def _posted(self, url: str, body: bytes | Body, attempt: Attempt) -> Answer | Deferred | Uncertain:
        """SES's answer, or what it means that there is none.

        Raises:
            ProviderFault, NoPlace: nothing left.
        """
        digest = await digest_of(body)
        try:
            credentials = await self._signing_credentials(attempt.deadline)
            # Signed when a connection is free: AWS takes no request that is minutes old.
            headers = partial(self._signed, credentials, "POST", url, digest)
            return await self._transport.post(url, headers, body, attempt)
        except TimeoutError:
            return Deferred(Reason.TIMEOUT_BEFORE_SEND, "the deadline passed before there were credentials")
        except NothingLeft as error:
            return unsent(error)
        except NoAnswer as error:
            return error.outcome

    async def _signing_credentials(self, deadline: float) -> ReadOnlyCredentials:
        if found := self._credentials.at_hand():
            return found
        try:
            return await self._credentials.wait(deadline)
        except TimeoutError:
            raise
        except Exception as error:
            raise unsigned(error) from error

    def _signed(self, credentials: ReadOnlyCredentials, method: str, url: str, digest: str) -> dict[str, str]:
        """The headers of a request, but for its host and length; signed with newer credentials where there are some."""
        credentials = self._credentials.at_hand() or credentials
        if self._signer is None or self._signer.credentials is not credentials:
            from dispatcher.providers.ses.signing import Signer

            self._signer = Signer(credentials, self._endpoint.signing_name, self._endpoint.region, self._headers)
        headers = self._signer.sign(method, url, digest)
        del headers["Host"]  # the transport's own is the same
        return headers

    def _praise(self, answer: Answer) -> str:
        """What SES says of the account."""
        if is_denied(answer):
            return "SES answers; these credentials may not ask for the account's state (ses:GetAccount)."
        if answer.status >= 300:
            outcome = refusal_of(answer)
            raise ProviderFault(NAME, f"SES: {outcome.detail}.", remedy=_REACH)
        account = answer.document
        if "SendingEnabled" not in account:
            raise ProviderFault(NAME, "what answers is not SES v2.", remedy="Check DISPATCHER_SES_ENDPOINT_URL.")
        if not account["SendingEnabled"]:
            raise ProviderFault(NAME, "SES has sending switched off for this account.", remedy=_CONSOLE)
        quota = account.get("SendQuota", {})
        most, sent, rate = (quota.get(name, 0) for name in ("Max24HourSend", "SentLast24Hours", "MaxSendRate"))
        if 0 < most <= sent:
            raise ProviderFault(NAME, f"SES's quota of {most:g} emails a day is used up.", remedy=_MORE)
        place = "" if account.get("ProductionAccessEnabled") else _SANDBOX
        limits = f"{rate:g} emails per second, {sent:g} of {most:g} sent within a day" if quota else "it tells no quota"
        return f"SES in {self._endpoint.region} answers: {limits}.{place}"


PROVIDER: Final = SesProvider
