"""The environment of the conformance suite for the ses adapter. Renders received requests as MIME messages."""

from __future__ import annotations

import asyncio
import base64
import email.message
import email.policy
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from email.header import decode_header, make_header
from email.headerregistry import Address
from email.utils import parseaddr
from pathlib import Path
from typing import Any, Final

import pytest

from dispatcher.dev.conformance import ProviderQuirks
from dispatcher.dev.http_behaviour import Behaviour
from dispatcher.dev.http_double import running_double
from dispatcher.domain.outcome import Accepted
from dispatcher.providers.contract import Provider
from dispatcher.providers.ses import SesProvider, SesSettings
from tests.providers.emails import an_email, send
from tests.providers.listeners import closing, listening
from tests.providers.places import HttpPlace, filled

ACCESS_KEY: Final = "AKIATHEKEYSNAMEXYZ12"
SECRET_KEY: Final = "the/secret+that/nobody+may/see/0123456789"
REGION: Final = "eu-west-1"
SES_QUIRKS: Final = ProviderQuirks(own_headers=frozenset({"Message-ID", "Date"}))
SesPlace = HttpPlace[SesProvider]
HIDDEN: Final = (
    *("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"),
)


@contextmanager
def aws_environment(**variables: str) -> Iterator[None]:
    """Set credentials for boto3 for the block, and hide this user's own AWS settings."""
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_EC2_METADATA_DISABLED": "true"}
    files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), "/dev/null")
    with pytest.MonkeyPatch.context() as patch:
        for name in (*HIDDEN, *map(str.lower, HIDDEN)):
            patch.delenv(name, raising=False)
        for name, value in {**keys, **files, **variables}.items():
            patch.setenv(name, value)
        yield


@asynccontextmanager
async def ses_provider(
    url: str, *, environment: Mapping[str, str] | None = None, connections: int = 64, ca_file: Path | None = None
) -> AsyncIterator[SesProvider]:
    with aws_environment(**(environment or {})):
        own = SesSettings(region=REGION, endpoint_url=url, connections=connections)
        async with closing(SesProvider(own, ca_file=ca_file)) as provider:
            yield provider


@asynccontextmanager
async def ses_place(
    folder: Path, behaviour: Behaviour | None = None, *, tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[SesPlace]:
    """Run the ses adapter, without TLS by default, and a double with this behaviour."""
    async with (
        running_double(folder, behaviour, tls=tls) as double,
        ses_provider(double.url, **options) as provider,
    ):
        yield HttpPlace(provider, double, SES_QUIRKS, rendered)


@dataclass
class Ses:
    """A server in place of SES that records requests and who signed them, and refuses credentials that have `ended`."""

    signers: list[str] = field(default_factory=list)
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    code: str = "ExpiredToken"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.split(": ", 1) for line in head.rstrip().split("\r\n")[1:])
            self.requests.append((headers, await reader.readexactly(int(headers["Content-Length"]))))
            signer = headers["Authorization"].partition("Credential=")[2].partition("/")[0]
            if signer.startswith("ROLE"):
                assert headers["X-Amz-Security-Token"] == signer.replace("ROLE", "token-")
            self.signers.append(signer)
            if signer in self.ended:
                head = f"HTTP/1.1 403 Forbidden\r\nx-amzn-ErrorType: {self.code}\r\nContent-Length: 2\r\n\r\n{{}}"
                writer.write(head.encode())
            else:
                writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"MessageId":"01"}')


@asynccontextmanager
async def provider_for(ses: Ses, environment: Mapping[str, str] | None = None) -> AsyncIterator[SesProvider]:
    async with (
        listening(ses.serve) as port,
        ses_provider(f"http://127.0.0.1:{port}", environment=environment) as provider,
    ):
        yield provider


async def accepted(provider: Provider) -> None:
    assert isinstance((await send(provider, an_email())).outcome, Accepted)


def rendered(document: dict[str, Any]) -> bytes:
    """The MIME message that SES builds from a request, without SES's own Message-ID and Date."""
    content = document["Content"]
    if "Raw" in content:
        return base64.b64decode(content["Raw"]["Data"])
    simple = content["Simple"]
    message = email.message.EmailMessage(policy=email.policy.SMTP)
    message["From"] = _mailbox(document["FromEmailAddress"])
    for key, name in (("ToAddresses", "To"), ("CcAddresses", "Cc")):
        if key in document["Destination"]:
            message[name] = [_mailbox(text) for text in document["Destination"][key]]
    if "ReplyToAddresses" in document:
        message["Reply-To"] = [_mailbox(text) for text in document["ReplyToAddresses"]]
    message["Subject"] = simple["Subject"]["Data"]
    texts = [(subtype, simple["Body"].get(name)) for name, subtype in (("Text", "plain"), ("Html", "html"))]
    assert {body["Charset"] for _, body in texts if body} <= {"UTF-8"}
    return filled(message, [(subtype, body["Data"]) for subtype, body in texts if body], [])


def _mailbox(text: str) -> Address:
    assert text.isascii(), "SES takes names that are not ASCII as encoded words alone"
    name, spec = parseaddr(text)
    return Address(str(make_header(decode_header(name))), addr_spec=spec)
