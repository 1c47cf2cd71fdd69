"""Logs in to an SMTP server with AUTH (RFC 4954): the methods PLAIN, LOGIN and CRAM-MD5, or XOAUTH2 with a token."""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Final

from dispatcher.transport.smtp_protocol import InvalidReply
from dispatcher.transport.smtp_replies import SmtpReply

Send = Callable[[str], Awaitable[SmtpReply]]
"""Sends one line, and returns the reply."""

_GO_ON: Final = 334
_NOT_UNDERSTOOD: Final = range(500, 505)
"""The server does not know the method, or its form. These codes say nothing about the password."""
_USER: Final = re.compile(
    r"(?i)user|login|name|account|e-?mail|benutzer|utilisateur|usu.ri|utente|логин|имя|польз|用户"
)
_STATUS: Final = re.compile(r'"status"\s*:\s*"?(\d{3})\b')
_PASSWORD: Final = re.compile(r"(?i)pass|pwd|kennw|contrase|senha|wachtw|lösen|hasło|heslo|parol|парол|密码")


async def log_in(send: Send, offered: Collection[str], user: str, password: str) -> SmtpReply | None:
    """Logs in. Returns the server's last reply; None if the server offers no method that we support."""
    # If the server refuses the password, no other method is tried: more attempts could lock the account. If the server
    # does not understand a method that it offers, the next method is tried.
    reply = None
    for name, method in _METHODS.items():
        if name in offered:
            reply = await method(send, user.encode(), password.encode())
            if reply.code == _GO_ON:  # a prompt that we do not answer
                reply = await send("*")
            elif reply.code not in _NOT_UNDERSTOOD:
                return reply
    return reply


async def log_in_with_token(send: Send, user: str, token: str) -> SmtpReply:
    """Logs in with an access token (XOAUTH2, as Google and Microsoft specify it). Returns the server's last reply."""
    login = f"user={user}\1auth=Bearer {token}\1\1"
    reply = await send(f"AUTH XOAUTH2 {_base64(login.encode())}")
    if reply.code != _GO_ON:
        return reply
    # The server explains the refusal in JSON, and refuses the login when it has an empty answer.
    status = _STATUS.search(_decoded(reply))
    reply = await send("")
    return replace(reply, text=f"{reply.text} (status {status[1]})") if status else reply


async def _plain(send: Send, user: bytes, password: bytes) -> SmtpReply:
    login = _base64(b"\0" + user + b"\0" + password)
    reply = await send(f"AUTH PLAIN {login}")
    if reply.code in _NOT_UNDERSTOOD:
        reply = await send("AUTH PLAIN")
    asks_for_one = _names(_USER, reply) or _names(_PASSWORD, reply)
    return reply if reply.code != _GO_ON or asks_for_one else await send(login)


async def _login(send: Send, user: bytes, password: bytes) -> SmtpReply:
    # Prompts can be in any language. By their order, the first prompt is for the user name, and never gets the
    # password. AUTH LOGIN never contains the user name, because some servers ignore it there, and ask for it once more.
    first = await send("AUTH LOGIN")
    if first.code != _GO_ON or (_names(_PASSWORD, first) and not _names(_USER, first)):
        return first
    second = await send(_base64(user))
    asks_again = _names(_USER, second) and not _names(_PASSWORD, second)
    if second.code != _GO_ON or asks_again or (second.text and second.text == first.text):
        return second
    return await send(_base64(password))


async def _cram_md5(send: Send, user: bytes, password: bytes) -> SmtpReply:
    reply = await send("AUTH CRAM-MD5")
    if reply.code != _GO_ON:
        return reply
    try:
        challenge = base64.b64decode(reply.text, validate=True)
    except ValueError:
        raise InvalidReply("the server's CRAM-MD5 challenge is not Base64") from None
    digest = hmac.digest(password, challenge, "md5").hex()
    return await send(_base64(user + b" " + digest.encode()))


_METHODS: Final = {"plain": _plain, "login": _login, "cram-md5": _cram_md5}


def _names(what: re.Pattern[str], prompt: SmtpReply) -> bool:
    """Whether a prompt names the user or the password."""
    return what.search(_decoded(prompt)) is not None


def _decoded(prompt: SmtpReply) -> str:
    """The text of a prompt. Some servers do not encode their prompts."""
    try:
        return base64.b64decode(prompt.text, validate=True).decode("utf-8", "replace")
    except ValueError:
        return prompt.text


def _base64(octets: bytes) -> str:
    return base64.b64encode(octets).decode()
