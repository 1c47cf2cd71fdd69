"""Requests access tokens from an OAuth 2.0 token endpoint (RFC 6749), such as Microsoft's or Google's.

A failure is `TokenUnavailable` (a later request might succeed) or `ProviderFault` (an operator must correct something).
Neither contains a text of the server, except its error code: a server can repeat a secret.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final
from urllib.parse import urlencode

from dispatcher.domain.outcome import Deferred, Reason
from dispatcher.domain.values import dataclass, field
from dispatcher.errors import ProviderFault
from dispatcher.transport.call import Deadline, NoFreeConnection
from dispatcher.transport.http import HttpTransport
from dispatcher.transport.http_response import HttpResponse, NoResponse, RequestNotSent
from dispatcher.transport.tls_faults import tls_fault

TOKEN_SECONDS: Final = 10.0
"""The time limit of one request for a token."""
UNKNOWN_LIFE_SECONDS: Final = 300.0
"""The lifetime of a token if the server gives none."""
MAX_LIFE_SECONDS: Final = 86_400.0
MAX_TOKEN_CHARACTERS: Final = 16_384

_URL: Final = "DISPATCHER_SMTP_OAUTH_TOKEN_URL"
_CLIENT: Final = "DISPATCHER_SMTP_OAUTH_CLIENT_ID"
_SECRET: Final = "DISPATCHER_SMTP_OAUTH_CLIENT_SECRET"  # noqa: S105 - the name of a setting
_REFRESH: Final = "DISPATCHER_SMTP_OAUTH_REFRESH_TOKEN"
_CODE: Final = re.compile(r"AADSTS\d{4,8}")
_REMEDIES: Final = {
    r"AADSTS(?:90002|90023|900021|900023|900971)\b": (
        f"Check the tenant in {_URL}: https://login.microsoftonline.com/TENANT/oauth2/v2.0/token."
    ),
    r"AADSTS700016\b": (
        f"The tenant does not have this app. Check {_CLIENT}, and the tenant in {_URL}; or let an administrator of the "
        "tenant consent to the app."
    ),
    r"AADSTS7000222\b": f"The client secret has expired. Create one, and set {_SECRET}.",
    r"AADSTS7000215\b": f"Set {_SECRET} to the value of the client secret, not to its id.",
    r"AADSTS65001\b|consent_required": (
        "Let an administrator of the tenant consent to the app's permission: SMTP.SendAsApp for the app itself, "
        "SMTP.Send for a refresh token."
    ),
    r"AADSTS(?:70011|1002012|28000|28003|500011)\b|invalid_scope": (
        "Correct DISPATCHER_SMTP_OAUTH_SCOPE. For Microsoft without a refresh token: "
        "https://outlook.office365.com/.default."
    ),
    r"invalid_grant": (
        "The refresh token has expired, was revoked, or belongs to another app or tenant. Sign in to the mailbox, "
        f"consent to the app again, and set {_REFRESH} to the new refresh token."
    ),
    r"unauthorized_client": (
        "Allow the app to request tokens in this way: without a refresh token, it needs the application permission "
        f"SMTP.SendAsApp; otherwise, {_CLIENT} must be the app for which the refresh token was issued."
    ),
    r"invalid_client": f"Check {_CLIENT} and {_SECRET}.",
    r"": f"Check {_URL} and {_CLIENT}.",
}
"""The remedies by error code, first the codes of Microsoft Entra. The first pattern that matches decides."""


@dataclass(frozen=True, slots=True)
class OAuthGrant:
    """Why a token endpoint gives us access tokens: for a refresh token, or, without one, for the client's secret."""

    token_url: str
    client_id: str
    client_secret: str = field(default="", repr=False)
    refresh_token: str = field(default="", repr=False)
    scope: str = ""

    @property
    def form(self) -> dict[str, str]:
        """The fields of a request."""
        kind = "refresh_token" if self.refresh_token else "client_credentials"
        fields = {
            "grant_type": kind,
            "client_id": self.client_id,
            "client_secret": self.client_secret,
            "refresh_token": self.refresh_token,
            "scope": self.scope,
        }
        return {name: value for name, value in fields.items() if value}


@dataclass(frozen=True, slots=True)
class GrantedToken:
    """An access token, how many seconds it is valid, and the refresh token that replaces the one of the request; empty
    if the old one stays in use."""

    access_token: str = field(repr=False)
    seconds: float
    refresh_token: str = field(default="", repr=False)


class TokenUnavailable(Exception):
    """The token endpoint did not give a token, and may give one later. `outcome` is for an email that waits for it."""

    def __init__(self, outcome: Deferred) -> None:
        super().__init__(outcome.detail)
        self.outcome = outcome


async def request_token(grant: OAuthGrant, provider: str, transport: HttpTransport) -> GrantedToken:
    """Raises TokenUnavailable or ProviderFault."""
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    body = urlencode(grant.form).encode()
    try:
        call = Deadline(asyncio.get_running_loop().time() + TOKEN_SECONDS)
        return _granted(await transport.post(grant.token_url, headers, body, call), provider)
    except RequestNotSent as error:
        if fault := tls_fault(provider, "the token endpoint", error.__cause__, url=_URL):
            raise fault from error
        raise _unavailable(error.reason, error.detail) from error
    except (NoResponse, NoFreeConnection) as error:
        raise _unavailable(Reason.CONNECTION_FAILED, str(error)) from error


def _granted(response: HttpResponse, provider: str) -> GrantedToken:
    document, status = response.document, response.status
    token, error = document.get("access_token"), document.get("error")
    if status == 200 and isinstance(token, str) and 0 < len(token) <= MAX_TOKEN_CHARACTERS and token.isascii():
        renewed = document.get("refresh_token")
        return GrantedToken(
            token, _life_seconds(document.get("expires_in")), renewed if isinstance(renewed, str) else ""
        )
    if status in (408, 429) or status >= 500 or error == "temporarily_unavailable":
        reason = Reason.THROTTLED if status == 429 else Reason.SERVER_ERROR
        raise _unavailable(reason, f"it answered {status}", response.retry_after)
    # A code is shown only if it has the form of one.
    codes = [error] if isinstance(error, str) and re.fullmatch(r"[a-z_]{1,40}", error) else []
    codes += sorted(set(_CODE.findall(str(document.get("error_description", "")))))[:3]
    words = ", ".join([str(status), *codes]) if status != 200 else "200 without an access token"
    remedy = next(remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, words))
    raise ProviderFault(provider, f"the token endpoint refuses a token ({words}).", remedy=remedy)


def _life_seconds(expires_in: object) -> float:
    try:
        seconds = float(expires_in) if isinstance(expires_in, int | float | str) else UNKNOWN_LIFE_SECONDS
    except ValueError:
        seconds = UNKNOWN_LIFE_SECONDS
    return min(seconds, MAX_LIFE_SECONDS) if seconds > 0 else UNKNOWN_LIFE_SECONDS


def _unavailable(reason: Reason, words: str, retry_after: float | None = None) -> TokenUnavailable:
    detail = f"no access token from the token endpoint: {words}"
    return TokenUnavailable(Deferred(reason, detail, retry_after=retry_after))
