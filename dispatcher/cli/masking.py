"""Secrets as a screen may show them: the password gone, the rest still telling where one connects to."""

from __future__ import annotations

import re
from typing import Final

from dispatcher.config.values import addresses

MASK: Final = "***"

# To the last @, because an unescaped @, / or # in a password is a common mistake and must not show its tail.
_URL: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^:@/?#]*)(?P<password>:.*)?@(?P<rest>[^@]*)", re.DOTALL
)
_BARE_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^@]*", re.DOTALL)
_KEYWORDS: Final = re.compile(r"\s*(?:\w+\s*=\s*(?:'(?:[^'\\]|\\.)*'|[^\s']*)\s*)+")
_SECRET_PARAMETER: Final = re.compile(
    r"(?P<name>\w*(?:pass|secret|token|key)\w*\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&']*)", re.IGNORECASE
)
_LOGIN: Final = re.compile(r"(?<=://).*@|(?<![^\s,])(?!\w+://)[^\s@,:]+:[^\s,]*@", re.DOTALL)
_HOST: Final = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]-]+(?=[/?#]|\Z)")


def without_login(text: str) -> str:
    """Masks the user, password and secret parameters of any URL in a text that is not itself a secret."""
    return _without_parameters(_LOGIN.sub(f"{MASK}@", text))


def without_path(text: str) -> str:
    """Masks all of a URL but scheme and host: in many webhooks the path and query are secret."""
    found = _HOST.match(text)
    return f"{found[0]}/{MASK}" if found else MASK


def masked(text: str) -> str:
    """A secret setting's text without its password: URLs or libpq's keywords; anything else is masked whole."""
    urls = addresses(text)
    # Every one has a login: else a part of a password might pass for a URL.
    if len(urls) > 1 and all("@" in url for url in urls):
        return ",".join(map(masked, urls))
    if found := _URL.fullmatch(text):
        password = f":{MASK}" if found["password"] else ""
        return f"{found['scheme']}{found['user']}{password}@{_without_parameters(found['rest'])}"
    if _BARE_URL.fullmatch(text) or _KEYWORDS.fullmatch(text):
        return _without_parameters(text)
    return MASK


def _without_parameters(text: str) -> str:
    return _SECRET_PARAMETER.sub(rf"\g<name>{MASK}", text)
