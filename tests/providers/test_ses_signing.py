"""Our Signature Version 4 equals botocore's signatures, and arrives at the server."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from dispatcher.domain.outcome import Accepted
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.errors import ProviderFault
from dispatcher.providers.ses.signing import Signer
from dispatcher.transport.body import Base64Content, Body, sha256_of
from tests.providers.emails import an_email, send
from tests.providers.ses_place import ACCESS_KEY, REGION, SECRET_KEY, Ses, provider_for

URL: Final = "https://email.eu-west-1.amazonaws.com/v2/email/outbound-emails"
FILE: Final = OutgoingAttachment("a.pdf", "application/pdf", bytes(300_000))
HEADERS: Final = {"Content-Type": "application/json", "Host": "email.eu-west-1.amazonaws.com", "User-Agent": "x"}


@pytest.mark.parametrize("token", [None, "a/session+token=="])
def test_botocores_signer_gives_the_same_signatures_on_every_day(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The derived key is cached only for the same day and the same credentials."""
    body = b'{"Content":{}}'
    now = [""]
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: datetime.fromisoformat(now[0]))
    for key in ("one", "two"):
        credentials = ReadOnlyCredentials("AKIDEXAMPLE", key, token, None)
        signer = Signer(credentials, "ses", REGION, HEADERS, lambda: datetime.fromisoformat(f"{now[0]}Z").timestamp())
        for instant in ("2026-11-22T23:59:59", "2026-11-23T00:00:00", "2026-11-23T00:00:01", "2026-11-22T23:59:59"):
            now[0] = instant
            theirs = AWSRequest("POST", URL, HEADERS, body)
            SigV4Auth(credentials, "ses", REGION).add_auth(theirs)

            assert signer.sign("POST", URL, hashlib.sha256(body).hexdigest()) == dict(theirs.headers.items())


def test_a_botocore_that_signs_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SigV4Auth, "canonical_request", lambda *_: "POST\n/\n20261123T000000Z\ndigest")
    signer = Signer(ReadOnlyCredentials("AKIDEXAMPLE", "secret", None, None), "ses", REGION, HEADERS)

    with pytest.raises(ProviderFault, match="botocore"):
        signer.sign("POST", URL, hashlib.sha256(b"").hexdigest())


async def test_a_large_bodys_digest_does_not_block_the_loop() -> None:
    body = Body((b"{", Base64Content(bytes(range(256)) * 4000), b"}"))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    digest = await sha256_of(body)
    counting.cancel()

    assert digest == hashlib.sha256(bytes(body)).hexdigest()
    assert turns > 10


@pytest.mark.parametrize(
    ("changes", "token"),
    [({}, "a/session+token=="), ({"attachments": (FILE,)}, None)],
    ids=["small, with a token", "large, without a token"],
)
async def test_requests_arrive_with_botocores_signature(
    changes: dict[str, Any], token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ses = Ses()
    async with provider_for(ses, {"AWS_SESSION_TOKEN": token} if token else None) as provider:
        sending = await send(provider, an_email(**changes))

    assert isinstance(sending.outcome, Accepted)
    ((headers, body),) = ses.requests
    theirs = AWSRequest("POST", f"http://{headers['Host']}/v2/email/outbound-emails", data=body)
    for name in ("Content-Type", "Host"):
        theirs.headers[name] = headers[name]
    signed_at = datetime.strptime(headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: signed_at)
    SigV4Auth(ReadOnlyCredentials(ACCESS_KEY, SECRET_KEY, token, None), "ses", REGION).add_auth(theirs)
    assert abs(datetime.now(UTC) - signed_at) < timedelta(minutes=1)
    assert headers["Authorization"] == theirs.headers["Authorization"]
    assert headers.get("X-Amz-Security-Token") == token
