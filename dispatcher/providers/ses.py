"""The ses adapter: Amazon SES v2 through boto3, in threads of its own.

ses_request  the email as parameters of SendEmail
ses_bulk     several emails as parameters of SendBulkEmail, and what its answers mean
ses_client   boto3's client, told to post once
ses_wire     whether a request left, and that none leaves too late
ses_errors   what each answer and exception means
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain, outcome_name
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.capabilities import SES
from dispatcher.providers.contract import Attempt, CallLimits, NoPlace, Part, RefusedTogether
from dispatcher.providers.mime_headers import UnrenderableEmail
from dispatcher.providers.ses_bulk import (
    LIMITS,
    email_id_of,
    outcomes_of_call,
    part_of,
    refusal_of_call,
    request_of_call,
)
from dispatcher.providers.ses_client import NAME, Client, SesOptions, check_ca_file, new_client, read_models
from dispatcher.providers.ses_errors import acceptance, judge
from dispatcher.providers.ses_request import request_for
from dispatcher.providers.ses_wire import Departure
from dispatcher.telemetry.log import get_log

Told = TypeVar("Told")
"""What a thread comes back with: an outcome, or those of a call."""

CHECK_SECONDS = 15.0
"""How long `check` gives credentials and SES together."""


class SesProvider:
    """Sends through SES; see `contract.Provider`.

    An email waits until a thread is free. The thread connects, and asks the loop before it writes: `leaving` is called
    then, on the loop's thread. A thread whose attempt is over posts nothing any more; it counts as taken until it has
    really ended, so that threads that hang are never more than there are.
    """

    def __init__(self, options: SesOptions, make_client: Callable[[SesOptions], Client] = new_client) -> None:
        """An adapter without client, threads and connections; they come with the first email.

        Args:
            make_client: Called in a thread.

        Raises:
            ssl.SSLError, OSError: the CA file cannot be used.
        """
        if options.ca_file is not None:
            check_ca_file(options.ca_file)
        read_models()
        self._options = options
        self._make_client = make_client
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix=NAME)
        self._free_threads = asyncio.Semaphore(options.threads)
        self._client: asyncio.Future[Client] | None = None

    @property
    def name(self) -> str:
        """`ses`."""
        return NAME

    @property
    def capabilities(self) -> Capabilities:
        """See `contract.Provider.capabilities`."""
        return SES

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt; see `contract.Provider.send`."""
        options = self._options

        def post(client: Client, departure: Departure) -> Outcome:
            return _post(client, email, options.configuration_set, attempt, departure)

        return await self._done(post, attempt, [str(email.email_id)])

    @property
    def limits(self) -> CallLimits:
        """Those of SendBulkEmail."""
        return LIMITS

    def part_of(self, email: OutgoingEmail) -> Part | None:
        """See `contract.BulkProvider.part_of`."""
        return part_of(email)

    async def send_many(
        self, parts: Sequence[Part], attempt: Attempt
    ) -> Sequence[Outcome | ProviderFault] | RefusedTogether:
        """One call; see `contract.BulkProvider.send_many`."""
        options = self._options

        def post(client: Client, departure: Departure) -> list[Outcome | ProviderFault] | RefusedTogether:
            return _post_many(client, parts, options.configuration_set, departure)

        told = await self._done(post, attempt, [email_id_of(part) for part in parts])
        return told if isinstance(told, list | RefusedTogether) else [told] * len(parts)

    async def check(self) -> str:
        """What SES says of the account, for `dispatcher doctor`; sends nothing.

        Raises:
            ProviderFault: SES cannot be used, now or before somebody mends something.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                client = await self._opened()
                return await loop.run_in_executor(self._threads, _account, client)
        except TimeoutError as error:
            raise ProviderFault(
                NAME, f"SES did not answer within {CHECK_SECONDS:g} s.", remedy="Is a firewall in between?"
            ) from error

    async def close(self) -> None:
        """Ends idle connections; waits for no thread. A second call is harmless."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None and _is_there(self._client):
            self._client.result().close()

    async def _opened(self) -> Client:
        """The client; made in a thread, because boto3 may ask a server for credentials."""
        if self._client is None or (self._client.done() and not _is_there(self._client)):
            self._client = asyncio.get_running_loop().run_in_executor(self._threads, self._make_client, self._options)
        # One email's deadline must not end what all of them wait for.
        return await asyncio.shield(self._client)

    async def _done(
        self, post: Callable[[Client, Departure], Told], attempt: Attempt, email_ids: Sequence[str]
    ) -> Told | Deferred | Uncertain:
        """What a thread says that posts, or what it means that there is none or that it does not come back in time."""
        try:
            async with asyncio.timeout_at(attempt.deadline):
                client = await self._opened()
        except TimeoutError:
            return Deferred(Reason.TIMEOUT_BEFORE_SEND, "the deadline passed before there was a client")
        try:
            async with asyncio.timeout_at(attempt.deadline):
                await self._free_threads.acquire()
        except TimeoutError:
            raise NoPlace from None
        try:
            attempt.admitted()
        except BaseException:
            self._free_threads.release()
            raise
        return await self._posted(post, client, attempt, email_ids)

    async def _posted(
        self, post: Callable[[Client, Departure], Told], client: Client, attempt: Attempt, email_ids: Sequence[str]
    ) -> Told | Deferred | Uncertain:
        """The same once there is a free thread, which the caller has taken."""
        loop = asyncio.get_running_loop()
        departure = Departure(attempt)
        try:
            posting = loop.run_in_executor(self._threads, post, client, departure)
        except RuntimeError as error:
            # The system has no thread to give. Whoever finds the job in the queue later may not do it.
            departure.end()
            self._free_threads.release()
            return Deferred(Reason.INTERNAL_ERROR, f"no thread could be started: {error}")
        posting.add_done_callback(lambda done: self._thread_ended(done, departure, email_ids))
        try:
            await asyncio.wait({posting}, timeout=max(0.0, attempt.deadline - loop.time()))
        finally:
            may_have_left = posting.done() or departure.end()
        if departure.refusal is not None:
            raise departure.refusal
        if posting.done():
            return posting.result()
        if may_have_left:
            return Uncertain("no answer before the deadline")
        return Deferred(Reason.TIMEOUT_BEFORE_SEND, "the deadline passed before the request left")

    def _thread_ended(self, posting: asyncio.Future[Told], departure: Departure, email_ids: Sequence[str]) -> None:
        self._free_threads.release()
        if posting.cancelled():
            return
        words = ["fault"] * len(email_ids) if posting.exception() else _words(posting.result(), len(email_ids))
        # What came of a socket that we shut, or of a request that never left, is no news.
        if departure.is_over and departure.has_left:
            for email_id, outcome in zip(email_ids, words, strict=True):
                if outcome != "uncertain":
                    get_log().warning("email.answered_late", email_id=email_id, provider=NAME, outcome=outcome)


def _is_there(client: asyncio.Future[Client]) -> bool:
    return client.done() and not client.cancelled() and client.exception() is None


def _post(
    client: Client, email: OutgoingEmail, configuration_set: str | None, attempt: Attempt, departure: Departure
) -> Outcome:
    """What a thread does; it builds the request as well, since 25 MB take most of a second."""
    try:
        with attempt.rendering:
            request = request_for(email, configuration_set)
    except UnrenderableEmail as error:
        return Rejected(error.reason, error.message)
    with departure.here():
        try:
            answer = client.send_email(**request)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whatever boto3 raises, the wire knows the phase
            return judge(error, has_left=departure.has_left, has_template=email.template_id is not None)
    return acceptance(answer)


def _post_many(
    client: Client, parts: Sequence[Part], configuration_set: str | None, departure: Departure
) -> list[Outcome | ProviderFault] | RefusedTogether:
    """What a thread does for several."""
    request = request_of_call(parts, configuration_set)
    with departure.here():
        try:
            answer = client.send_bulk_email(**request)
        except Exception as error:  # noqa: BLE001 - as above
            return refusal_of_call(judge(error, has_left=departure.has_left, has_template=True), len(parts))
    return outcomes_of_call(answer, len(parts))


def _words(told: Any, count: int) -> list[str]:
    """How the outcomes are called that a thread came back with."""
    if isinstance(told, RefusedTogether):
        return ["rejected"] * count
    outcomes = told if isinstance(told, list) else [told]
    return ["fault" if isinstance(each, ProviderFault) else outcome_name(each) for each in outcomes]


def _account(client: Client) -> str:
    """What SES says of the account."""
    try:
        account = client.get_account()
    except Exception as error:  # noqa: BLE001 - the edge of a thread
        if isinstance(error, ClientError) and error.response["Error"]["Code"].startswith("AccessDenied"):
            return "SES answers; these credentials may not ask for the account's state (ses:GetAccount)."
        outcome = judge(error, has_left=isinstance(error, ClientError))
        words = "it answers nothing of sense" if isinstance(outcome, Accepted) else outcome.detail
        raise ProviderFault(NAME, f"SES: {words}.", remedy="Is it reachable, and AWS_REGION right?") from None
    return _praise(client, account)


def _praise(client: Client, account: Mapping[str, Any]) -> str:
    if "SendingEnabled" not in account:
        raise ProviderFault(NAME, "what answers is not SES v2.", remedy="Check DISPATCHER_SES_ENDPOINT_URL.")
    if not account["SendingEnabled"]:
        raise ProviderFault(NAME, "SES has sending switched off for this account.", remedy="Look into SES's console.")
    quota = account.get("SendQuota", {})
    most, sent, rate = (quota.get(name, 0) for name in ("Max24HourSend", "SentLast24Hours", "MaxSendRate"))
    if 0 < most <= sent:
        raise ProviderFault(NAME, f"SES's quota of {most:g} emails a day is used up.", remedy="Wait, or ask for more.")
    place = "" if account.get("ProductionAccessEnabled") else " In the sandbox: only to addresses that are verified."
    limits = f"{rate:g} emails per second, {sent:g} of {most:g} sent within a day" if quota else "it tells no quota"
    return f"SES in {client.meta.region_name} answers: {limits}.{place}"
