"""What an operator can do if an SMTP server refuses our login, our name or every email."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from dispatcher.domain.scrub import scrub
from dispatcher.errors import ProviderFault
from dispatcher.transport.smtp_replies import SmtpReply

NAME: Final = "smtp"
URL: Final = "DISPATCHER_SMTP_URL (smtp:// uses STARTTLS, smtps:// uses TLS from the first byte)"

BAD_SECURITY: Final = f"Check {URL}."
BAD_NAME: Final = (
    "Set DISPATCHER_SMTP_EHLO_NAME to this host's full name in DNS. The name must resolve to the host's public address."
)
NO_PASSWORDS: Final = (
    "The server accepts no password. Log in with OAuth: set DISPATCHER_SMTP_OAUTH_TOKEN_URL and the settings that it "
    "needs (docs/providers-accounts.md), or use a relay."
)

_REMEDIES: Final = {
    r"credits? exceeded|quota|limit.*exceed|exceed.*limit": "Raise the account's limit at the provider, or wait.",
    r" 5\.7\.(?:30|139) |oauth|basic auth|modern auth|smtpclientauth": NO_PASSWORDS,
    r"^534 5\.7\.(?:9|14) |application[- ]specific|app(?:[- ]specific)? password|web ?(?:browser|login)": (
        "Create an app password for the account, and set it in DISPATCHER_SMTP_URL."
    ),
    r" 4\.7\.12 |password transition|password.*expired|change.*password": (
        "Set a new password for the account at the provider, and then in DISPATCHER_SMTP_URL."
    ),
    r"^538 | 5\.7\.11 |starttls|\b(?:tls|ssl)\b|encrypt": f"The server requires TLS. {BAD_SECURITY}",
    r"^50[0-4] ": f"The server does not complete a login method that it offers. {BAD_SECURITY}",
    r"^4": "Wait. If the refusals continue, ask the provider why it refuses the login.",
    r"": "Check the user and password in DISPATCHER_SMTP_URL.",
}
"""The remedies for codes and words of a refused login. The first pattern that matches decides."""


OAUTH_REMEDIES: Final = {
    r" 5\.7\.139 |smtpclientauth": (
        "Allow SMTP AUTH for the mailbox in Exchange Online: Set-CASMailbox -SmtpClientAuthenticationDisabled $false. "
        "If security defaults or the authentication policy of the tenant block it, change these, too."
    ),
    r"^535 5\.7\.3 ": (
        "Check that the user in DISPATCHER_SMTP_URL is the mailbox's address. If the app logs in by itself, it needs "
        "the permission SMTP.SendAsApp with an administrator's consent, its service principal in Exchange Online "
        "(New-ServicePrincipal), and FullAccess to the mailbox (Add-MailboxPermission). With a refresh token, it needs "
        "SMTP.Send."
    ),
    r"^535 5\.7\.8 ": (
        "Check that the user in DISPATCHER_SMTP_URL is the account that consented to the app, with the scope "
        "https://mail.google.com/."
    ),
    r"": "Check the user in DISPATCHER_SMTP_URL, and the app's permission to send over SMTP.",
}
"""As `_REMEDIES`, for a login with an access token."""


def remedy_for(reply: SmtpReply, remedies: Mapping[str, str] = _REMEDIES) -> str:
    """What to do about a refusal that concerns our login, our name or TLS."""
    if reply.blames_our_name:
        return BAD_NAME
    words = f"{reply.codes} {reply.text[:1000]}"
    return next(remedy for pattern, remedy in remedies.items() if re.search(pattern, words, re.IGNORECASE))


def setup_fault(what: str, reply: SmtpReply, remedy: str | None = None) -> ProviderFault:
    """The fault for a refusal that concerns every email. `what`: such as `refuses the login`."""
    words = scrub(reply.text).rstrip(".")
    message = f"the SMTP server {what} ({reply.codes}){': ' if words else ''}{words}."
    return ProviderFault(NAME, message, remedy=remedy or remedy_for(reply))
