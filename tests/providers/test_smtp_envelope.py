"""With an address for bounces, the envelope sender has the email's token, and the message stays the same."""

from __future__ import annotations

from pathlib import Path

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_sink import running_sink
from dispatcher.domain.bounce_address import BounceAddress
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from tests.providers.emails import an_email, parsed, send
from tests.providers.places import smtp_place

KEY = "a-key-of-at-least-32-characters-one"
ON = {"DISPATCHER_SMTP_BOUNCE_ADDRESS": "bounces@example.net", "DISPATCHER_SMTP_BOUNCE_KEYS": KEY}


async def test_the_envelope_sender_is_the_sender_by_default(tmp_path: Path) -> None:
    email = an_email(sender="Shop <shop@example.com>")
    async with smtp_place(tmp_path) as place:
        await send(place.provider, email)

    assert [received.sender for received in place.sink.received] == ["shop@example.com"]


async def test_the_envelope_sender_has_the_token_of_the_email(tmp_path: Path) -> None:
    email = an_email(sender="Shop <shop@example.com>")
    async with running_sink(tmp_path / "plain") as plain, running_sink(tmp_path / "token") as sink:
        for each, bounces in (
            (plain, {}),
            (sink, {"bounce_address": "bounces@example.net", "bounce_keys": (KEY.encode(),)}),
        ):
            provider = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", each.port, "none"), **bounces))  # type: ignore[arg-type]
            await send(provider, email)
            await provider.close()

    (received,) = sink.received
    assert BounceAddress("bounces@example.net", [KEY.encode()]).find(received.sender) == email.email_id
    assert received.content == plain.received[0].content
    assert parsed(received.content)["From"] == "Shop <shop@example.com>"
