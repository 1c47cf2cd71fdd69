"""Runs the conformance suite (`dispatcher.dev.conformance`) for the built-in providers."""

from __future__ import annotations

import pytest

from dispatcher.config import BUILT_IN
from dispatcher.dev.conformance import ContentConformance, TextConformance
from tests.providers.http_places import resend_place, sendgrid_place, twilio_place
from tests.providers.places import capture_place, sms_capture_place, smtp_place
from tests.providers.ses_place import ses_place


class TestSendGrid(ContentConformance, place=sendgrid_place): ...


class TestSes(ContentConformance, place=ses_place): ...


class TestResend(ContentConformance, place=resend_place): ...


class TestSmtp(ContentConformance, place=smtp_place): ...


class TestTwilio(TextConformance, place=twilio_place): ...


class TestSmsCapture(TextConformance, place=sms_capture_place): ...


class TestCapture(ContentConformance, place=capture_place): ...


async def test_every_built_in_provider_is_tested(tmp_path_factory: pytest.TempPathFactory) -> None:
    names = []
    for found in [each for name, each in globals().items() if name.startswith("Test")]:
        async with found.open_place(tmp_path_factory.mktemp("place")) as opened:
            names.append(opened.provider.name)

    assert sorted(names) == list(BUILT_IN)
