"""The provider `sms-capture`: writes each SMS to a JSON file in a Maildir and delivers nothing.

For development and tests. An SMS that is sent twice leaves two files, as with the provider `capture`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from dispatcher.config import setting, values
from dispatcher.domain.capabilities import Capabilities
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.sms import SMS_CHANNEL, segments_of
from dispatcher.domain.text import body_fault
from dispatcher.providers.capture import CaptureProvider, CaptureSettings
from dispatcher.transport.mime_headers import UnrenderableEmail

NAME: Final = "sms-capture"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmsCaptureSettings(CaptureSettings):
    dir: Path | None = setting(
        values.path_of, None, "Maildir that the sms-capture provider writes into.", needed="set a folder"
    )


class SmsCaptureProvider(CaptureProvider):
    name = NAME
    capabilities = Capabilities(copies=4, channel=SMS_CHANNEL, delivers=False)
    settings = SmsCaptureSettings
    _suffix = "json"
    _variable = "DISPATCHER_SMS_CAPTURE_DIR"

    @staticmethod
    async def _rendered(email: OutgoingEmail) -> bytes:
        if not email.text:
            raise UnrenderableEmail(Reason.INVALID_CONTENT, "the SMS has no text")
        if fault := body_fault(email.text):
            raise UnrenderableEmail(Reason.INVALID_CONTENT, f"text {fault}")
        if len(email.to) != 1:
            words = f"the SMS has {len(email.to)} recipients; it must have exactly one"
            raise UnrenderableEmail(Reason.INVALID_CONTENT, words)
        segments = segments_of(email.text)
        return orjson.dumps(
            {
                "email_id": email.email_id,
                "created_at": email.created_at,
                "from": email.sender,
                "to": email.to[0],
                "text": email.text,
                "alphabet": segments.alphabet,
                "segments": segments.count,
                "tags": email.tags,
            },
            option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
        )


PROVIDER: Final = SmsCaptureProvider
