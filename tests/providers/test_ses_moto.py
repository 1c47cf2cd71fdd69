"""The ses adapter sends to moto, because our double and our adapter could have the same mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import boto3.session
import pytest
from moto.backends import get_backend
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.server import ThreadedMotoServer

from dispatcher.domain.outcome import Accepted, Rejected
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.providers.ses import SesProvider
from tests.providers.emails import an_email, parsed, send
from tests.providers.ses_place import REGION, aws_environment, ses_provider


@pytest.fixture(scope="module")
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


@pytest.fixture
async def provider(moto_url: str) -> AsyncIterator[SesProvider]:
    """An adapter that sends to moto."""
    async with ses_provider(moto_url) as opened:
        yield opened


def arrived(message_id: str | None) -> Any:
    """moto's record of a message."""
    messages = get_backend("ses")[DEFAULT_ACCOUNT_ID][REGION].sent_messages
    (message,) = [message for message in messages if message.id == message_id]
    return message


async def test_simple_content_arrives(provider: SesProvider) -> None:
    sending = await send(provider, an_email(html="<p>Thänk you", cc=("bob@example.com",), bcc=("eve@example.com",)))

    assert isinstance(sending.outcome, Accepted)
    message = arrived(sending.outcome.provider_message_id)
    assert (message.source, message.subject, message.body) == ("Shop <shop@example.org>", "Your order", "<p>Thänk you")
    assert message.destinations == {
        "ToAddresses": ["ann@example.com"],
        "CcAddresses": ["bob@example.com"],
        "BccAddresses": ["eve@example.com"],
    }


async def test_raw_content_arrives(provider: SesProvider) -> None:
    file = OutgoingAttachment("Rechnung für März.pdf", "application/pdf", bytes(range(256)) * 100)

    sending = await send(provider, an_email(bcc=("eve@example.com",), headers={"X-A": "Grüße"}, attachments=(file,)))

    assert isinstance(sending.outcome, Accepted)
    message = arrived(sending.outcome.provider_message_id)
    assert message.source == "shop@example.org"
    # moto adds the recipients that it finds in the headers.
    assert set(message.destinations) == {"ann@example.com", "eve@example.com"}
    content = parsed(message.raw_data.encode())
    assert content["X-A"] == "Grüße"
    assert [part.get_payload(decode=True) for part in content.iter_attachments()] == [file.content]


async def test_moto_refuses_the_same(provider: SesProvider) -> None:
    sending = await send(provider, an_email(sender="somebody@example.net"))

    assert isinstance(sending.outcome, Rejected)
    assert sending.outcome.code == "MessageRejected"
    assert "@" not in (sending.outcome.detail or "")
