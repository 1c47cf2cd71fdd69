"""Masks secrets for display: hides passwords and tokens, but shows hosts, so that operators can check them."""

from __future__ import annotations

import re
from typing import Final

from dispatcher.config.values import addresses

MASK: Final = "***"

# The login extends to the last @: people forget to escape @, / and # in passwords, and no part of a password may be
# shown.
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
    """Masks the user, the password and secret parameters of every URL in a text. For settings that are not secret."""
    return _without_parameters(_LOGIN.sub(f"{MASK}@", text))


def without_path(text: str) -> str:
    """Masks a URL except for its scheme and host, because many webhooks' URLs have a secret path or query."""
    found = _HOST.match(text)
    return f"{found[0]}/{MASK}" if found else MASK


def masked(text: str) -> str:
    """Masks the passwords in a URL or a libpq string; returns `***` for any other text. For secret settings."""
    urls = addresses(text)
    # Split the list only if every URL has a login: otherwise, a part of a password could be mistaken for a URL.
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
