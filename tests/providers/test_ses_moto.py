"""The ses adapter sends to moto, because our double and our adapter could have the same mistake."""

from __future__ import annotations

from collections.abc import Iterator

import boto3.session
import pytest
from moto.backends import get_backend
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.server import ThreadedMotoServer

from dispatcher.domain.outcome import Rejected
from dispatcher.domain.outgoing import OutgoingAttachment
from tests.providers.emails import an_email, parsed, send
from tests.providers.ses_place import REGION, aws_environment, ses_provider


@pytest.fixture
def moto_url() -> Iterator[str]:
    """The URL of moto's server, which has one verified sender."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    with aws_environment():
        client = boto3.session.Session(region_name=REGION).client("sesv2", endpoint_url=url)
        client.create_email_identity(EmailIdentity="shop@example.org")
        client.close()
    yield url
    server.stop()


async def test_simple_and_raw_content_arrive_and_an_unverified_sender_is_refused(moto_url: str) -> None:
    file = OutgoingAttachment("Rechnung für März.pdf", "application/pdf", bytes(range(256)) * 100)
    raw = {"headers": {"X-A": "Grüße"}, "attachments": (file,)}
    emails = [an_email(bcc=("eve@example.com",), html="<p>Thänk you", **more) for more in ({}, raw)]
    async with ses_provider(moto_url) as provider:
        outcomes = [(await send(provider, each)).outcome for each in (*emails, an_email(sender="a@example.net"))]

    sent = {each.id: each for each in get_backend("ses")[DEFAULT_ACCOUNT_ID][REGION].sent_messages}
    simple, mime = (sent[getattr(each, "provider_message_id", "")] for each in outcomes[:2])
    assert (simple.source, simple.subject, simple.body) == ("Shop <shop@example.org>", "Your order", "<p>Thänk you")
    assert simple.destinations == {"ToAddresses": ["ann@example.com"], "BccAddresses": ["eve@example.com"]}
    assert mime.source == "shop@example.org"
    assert set(mime.destinations) == {"ann@example.com", "eve@example.com"}  # moto adds those of the headers
    content = parsed(mime.raw_data.encode())
    assert content["X-A"] == "Grüße"
    assert [part.get_payload(decode=True) for part in content.iter_attachments()] == [file.content]
    refused = outcomes[2]
    assert isinstance(refused, Rejected)
    assert refused.code == "MessageRejected"
    assert "@" not in (refused.detail or "")
