"""While AWS credentials are fetched or renewed from a server, only emails through SES may wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import orjson
import pytest

from dispatcher.domain.outcome import Accepted, Concern, Deferred, Reason
from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.providers.ses import SesProvider
from tests.providers.emails import PATIENCE_SECONDS, SOON_SECONDS, an_email, send
from tests.providers.http_places import sendgrid_place
from tests.providers.listeners import listening
from tests.providers.ses_place import Ses, accepted, aws_environment, provider_for, ses_place
from tests.waiting import until

HOUR = 3600
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}


@dataclass
class Role:
    """A server that issues a role's credentials, like a container's agent. `answers`: set while it answers."""

    lasts_seconds: float = HOUR
    status: int = 200
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0
    given: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        await self.answers.wait()
        self.given += 1
        expires_at = datetime.now(UTC) + timedelta(seconds=self.lasts_seconds)
        keys = {"AccessKeyId": f"ROLE{self.given}", "SecretAccessKey": "secret", "Token": f"token-{self.given}"}
        body = orjson.dumps({**keys, "Expiration": expires_at.strftime("%Y-%m-%dT%H:%M:%SZ")})
        head = b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (self.status, len(body))
        writer.write(head + body)


@asynccontextmanager
async def signed_by(role: Role) -> AsyncIterator[tuple[SesProvider, Ses]]:
    """Create the adapter, which gets its credentials from the role's server, and a server in place of SES."""
    ses = Ses()
    async with listening(role.serve) as port:
        environment = {**NO_KEYS, "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://127.0.0.1:{port}/"}
        async with provider_for(ses, environment) as provider:
            yield provider, ses


def open_role(*, lasts_seconds: float = HOUR, status: int = 200) -> Role:
    role = Role(lasts_seconds, status)
    role.answers.set()
    return role


async def test_credentials_are_fetched_once_sign_every_request_and_are_in_no_text() -> None:
    role = open_role()
    async with signed_by(role) as (provider, ses):
        await asyncio.gather(*(accepted(provider) for _ in range(20)))
        words = "The canonical string was 'x-amz-security-token:{}', the key {}"
        assert scrub(words.format("token-1", "secret")) == words.format("<credential>", "<credential>")

    assert role.given == 1
    assert ses.signers == ["ROLE1"] * 20


async def test_a_hanging_credentials_server_delays_no_other_providers_emails(tmp_path: Path) -> None:
    role = Role()
    async with signed_by(role) as (provider, ses), sendgrid_place(tmp_path) as place:
        waiting = asyncio.create_task(send(provider, an_email()))
        late = asyncio.create_task(send(provider, an_email(), seconds=SOON_SECONDS))
        await until(lambda: role.asked == 1)
        other = await send(place.provider, an_email())
        was_waiting = not waiting.done()
        sending = await late
        role.answers.set()

        assert isinstance((await waiting).outcome, Accepted)
    assert isinstance(other.outcome, Accepted)
    assert was_waiting
    words = "the deadline passed before AWS credentials were found"
    assert sending.outcome == Deferred(Reason.TIMEOUT_BEFORE_SEND, words, known_concern=Concern.PROVIDER)
    assert sending.left == 0
    assert ses.signers == ["ROLE1"]


@pytest.mark.parametrize(("lasts_seconds", "waits"), [(600, False), (25, True)], ids=["ten minutes", "expiring"])
async def test_emails_use_the_old_credentials_during_a_renewal_unless_these_expire(
    lasts_seconds: float, waits: bool
) -> None:
    """With botocore alone, callers would wait for new credentials while the old ones are valid for ten minutes."""
    role = open_role(lasts_seconds=lasts_seconds)
    async with signed_by(role) as (provider, ses):
        await accepted(provider)
        old = role.given
        role.answers.clear()
        role.lasts_seconds = HOUR
        sending = asyncio.create_task(sent_until(provider, lambda: ses.signers[-1] == f"ROLE{old + 1}"))
        await until(lambda: role.asked == old + 1)
        signed = len(ses.signers) + 1
        await (asyncio.wait({sending}, timeout=SOON_SECONDS) if waits else until(lambda: len(ses.signers) > signed))
        assert ses.signers[signed:] == [] or not waits
        role.answers.set()
        await sending

    assert set(ses.signers) == {f"ROLE{old}", f"ROLE{old + 1}"}
    assert ses.signers == sorted(ses.signers)
    assert role.given == old + 1


async def test_without_credentials_nothing_is_sent_until_they_arrive(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        with (
            aws_environment(**NO_KEYS),
            pytest.raises(ProviderFault, match=r"NoCredentialsError.*AWS_ACCESS_KEY_ID"),
        ):
            await send(place.provider, an_email())
        assert not place.double.begun

        await accepted(place.provider)


async def test_refused_credentials_are_a_fault_until_they_are_issued() -> None:
    role = open_role(status=403)
    async with signed_by(role) as (provider, ses):
        with pytest.raises(ProviderFault, match=r"no AWS credentials to sign requests with.*AWS_ACCESS_KEY_ID"):
            await send(provider, an_email())
        role.status = 200
        await accepted(provider)

    assert len(ses.signers) == 1


@pytest.mark.parametrize("code", ["ExpiredToken", "ExpiredTokenException", "UnrecognizedClientException"])
async def test_credentials_that_ended_early_are_renewed_once_and_the_same_attempts_send(code: str) -> None:
    role = open_role()
    async with signed_by(role) as (provider, ses):
        await accepted(provider)
        ses.ended, ses.code = {"ROLE1"}, code
        sendings = await asyncio.gather(*(send(provider, an_email()) for _ in range(20)))

    assert {type(sending.outcome) for sending in sendings} == {Accepted}
    assert ses.signers.count("ROLE2") == 20
    assert role.given == 2


async def test_renewed_credentials_that_are_refused_too_are_a_fault() -> None:
    role = open_role()
    async with signed_by(role) as (provider, ses):
        ses.ended = {"ROLE1", "ROLE2"}
        with pytest.raises(ProviderFault, match=r"SES refuses every email \(ExpiredToken\).*Check AWS's credentials"):
            await send(provider, an_email())

    assert ses.signers == ["ROLE1", "ROLE2"]


async def test_keys_that_were_replaced_in_the_file_are_read_again(tmp_path: Path) -> None:
    file, ses = tmp_path / "credentials", Ses(ended={"OLD"})
    profile = "[default]\naws_access_key_id = {}\naws_secret_access_key = secret\n"
    file.write_text(profile.format("OLD"))
    async with provider_for(ses, {**NO_KEYS, "AWS_SHARED_CREDENTIALS_FILE": str(file)}) as provider:
        with pytest.raises(ProviderFault):
            await send(provider, an_email())
        assert ses.signers == ["OLD"]  # the file has no other keys, so the request is not repeated
        file.write_text(profile.format("NEW"))
        await accepted(provider)

    assert ses.signers[-2:] == ["OLD", "NEW"]


async def sent_until(provider: SesProvider, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await accepted(provider)
