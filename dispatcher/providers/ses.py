"""The ses adapter: Amazon SES v2 through boto3, in threads of its own.

ses_request  the email as parameters of SendEmail
ses_client   boto3's client, told to post once
ses_wire     whether a request left, and that none leaves too late
ses_errors   what each answer and exception means
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

from botocore.exceptions import ClientError

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain, outcome_name
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt
from dispatcher.providers.mime_headers import UnrenderableEmail
from dispatcher.providers.ses_client import NAME, Client, SesOptions, check_ca_file, new_client, quieten, read_models
from dispatcher.providers.ses_errors import acceptance, judge
from dispatcher.providers.ses_request import Parameters, request_for
from dispatcher.providers.ses_wire import Departure
from dispatcher.telemetry.log import get_log

CHECK_SECONDS = 15.0
"""How long `check` gives credentials and SES together."""


class SesProvider:
    """Sends through SES; see `contract.Provider`.

    An email takes a thread when one is free, and only then `leaving` is called: on the loop's thread, so before the
    connection is opened. A connection that fails is a definite no all the same. A thread whose attempt is over posts
    nothing any more; it counts as taken until it has really ended, so that threads which hang are never more than there are.
    """

    def __init__(self, options: SesOptions) -> None:
        """An adapter without client, threads and connections; they come with the first email.

        Raises:
            ssl.SSLError, OSError: the CA file cannot be used.
        """
        quieten()
        if options.ca_file is not None:
            check_ca_file(options.ca_file)
        read_models()
        self._options = options
        self._threads = ThreadPoolExecutor(options.threads, thread_name_prefix=NAME)
        self._free_threads = asyncio.Semaphore(options.threads)
        self._client: asyncio.Future[Client] | None = None

    @property
    def name(self) -> str:
        """`ses`."""
        return NAME

    async def send(self, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        """One attempt; see `contract.Provider.send`."""
        try:
            request = request_for(email, self._options.configuration_set)
        except UnrenderableEmail as error:
            return Rejected(error.reason, error.message)
        try:
            async with asyncio.timeout_at(attempt.deadline):
                client = await self._opened()
                await self._free_threads.acquire()
        except TimeoutError:
            return Deferred(Reason.TIMEOUT_BEFORE_SEND, "the deadline passed before a thread was free")
        try:
            attempt.leaving()
        except BaseException:
            self._free_threads.release()
            raise
        return await self._posted(client, request, email.email_id, attempt.deadline)

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
        if self._client is not None and self._client.done() and not self._client.exception():
            self._client.result().close()

    async def _opened(self) -> Client:
        """The client; made in a thread, because boto3 may ask a server for credentials."""
        if self._client is None or (self._client.done() and self._client.exception()):
            self._client = asyncio.get_running_loop().run_in_executor(self._threads, new_client, self._options)
        # One email's deadline must not end what all of them wait for.
        return await asyncio.shield(self._client)

    async def _posted(self, client: Client, request: Parameters, email_id: UUID, deadline: float) -> Outcome:
        """The outcome of a request that a thread posts; the caller has taken one."""
        loop = asyncio.get_running_loop()
        departure = Departure(time.monotonic() + deadline - loop.time())
        try:
            posting = loop.run_in_executor(self._threads, _post, client, request, departure)
        except RuntimeError as error:
            # The system has no thread to give. Whoever finds the job later must not do it.
            departure.end()
            self._free_threads.release()
            return Deferred(Reason.INTERNAL_ERROR, f"no thread could be started: {error}")
        posting.add_done_callback(lambda done: self._thread_ended(done, departure, email_id))
        try:
            await asyncio.wait({posting}, timeout=max(0.0, deadline - loop.time()))
        finally:
            may_have_left = not posting.done() and departure.end()
        if posting.done():
            return posting.result()
        if may_have_left:
            return Uncertain("no answer before the deadline")
        return Deferred(Reason.TIMEOUT_BEFORE_SEND, "the deadline passed before the request left")

    def _thread_ended(self, posting: asyncio.Future[Outcome], departure: Departure, email_id: UUID) -> None:
        self._free_threads.release()
        if posting.cancelled() or not departure.is_over:
            return
        outcome = "fault" if posting.exception() else outcome_name(posting.result())
        get_log().warning("email.answered_late", email_id=str(email_id), provider=NAME, outcome=outcome)


def _post(client: Client, request: Parameters, departure: Departure) -> Outcome:
    """What a thread does."""
    with departure.here():
        try:
            answer = client.send_email(**request)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whatever boto3 raises, the wire knows the phase
            return judge(error, has_left=departure.has_left, has_template="Template" in request["Content"])
    return acceptance(answer)


def _account(client: Client) -> str:
    """What SES says of the account."""
    try:
        account = client.get_account()
    except Exception as error:  # noqa: BLE001 - the edge of a thread
        if isinstance(error, ClientError) and error.response["Error"]["Code"].startswith("AccessDenied"):
            return "SES answers; these credentials may not ask for the account's state (ses:GetAccount)."
        outcome = judge(error, has_left=isinstance(error, ClientError))
        words = "it answers nothing of sense" if isinstance(outcome, Accepted) else outcome.detail
        raise ProviderFault(NAME, f"SES: {words}.", remedy="Is it reachable, and AWS_REGION right?") from error
    return _praise(client, account)


def _praise(client: Client, account: Mapping[str, Any]) -> str:
    quota = account.get("SendQuota", {})
    most, sent, rate = (quota.get(name, 0) for name in ("Max24HourSend", "SentLast24Hours", "MaxSendRate"))
    if not account.get("SendingEnabled"):
        raise ProviderFault(NAME, "SES has sending switched off for this account.", remedy="Look into SES's console.")
    if 0 < most <= sent:
        raise ProviderFault(NAME, f"SES's quota of {most:g} emails a day is used up.", remedy="Wait, or ask AWS for more.")
    place = "" if account.get("ProductionAccessEnabled") else " In the sandbox: only to addresses that are verified."
    limits = f"{rate:g} emails per second, {sent:g} of {most:g} sent within a day" if quota else "tells no quota"
    return f"SES in {client.meta.region_name} answers: {limits}.{place}"
