"""Runs the conformance suite (`dispatcher.dev.conformance`) for the built-in providers."""

from __future__ import annotations

import pytest

from dispatcher.config import BUILT_IN
from dispatcher.dev.conformance import ChannelConformance, Conformance, ContentConformance, TextConformance
from tests.providers.places import capture_place, sms_capture_place, smtp_place
from tests.providers.resend_place import resend_place
from tests.providers.sendgrid_place import sendgrid_place
from tests.providers.ses_place import ses_place
from tests.providers.twilio_place import twilio_place


class TestSendGrid(ContentConformance, place=sendgrid_place): ...


class TestSes(ContentConformance, place=ses_place): ...


class TestResend(ContentConformance, place=resend_place): ...


class TestSmtp(ContentConformance, place=smtp_place): ...


class TestTwilio(TextConformance, place=twilio_place): ...


class TestSmsCapture(TextConformance, place=sms_capture_place): ...


class TestCapture(ContentConformance, place=capture_place): ...


async def test_every_built_in_provider_is_tested(tmp_path_factory: pytest.TempPathFactory) -> None:
    names = []
    kinds = (ChannelConformance, TextConformance, Conformance, ContentConformance)
    for found in [each for kind in kinds for each in kind.__subclasses__()]:
        if found.__test__ and found.__module__ == __name__:
            async with found.open_place(tmp_path_factory.mktemp("place")) as opened:
                names.append(opened.provider.name)

    assert sorted(names) == list(BUILT_IN)
