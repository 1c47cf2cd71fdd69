"""Parsers of settings: functions that convert a variable's text to the setting's value.

If the text is invalid, a parser raises ValueError. The message follows the variable's name, such as
`must be on or off`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import pkgutil
import re
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from dispatcher.domain.lanes import LANE, NORMAL
from dispatcher.domain.values import dataclass, field
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from dispatcher.domain.accounts import AccountRules

LOOPBACKS: Final = ("127.0.0.1", "::1", "localhost")
"""Hosts to which secrets may be sent without TLS."""


@dataclass(frozen=True, slots=True)
class SmtpServer:
    """An SMTP server, parsed from a setting such as `DISPATCHER_SMTP_URL`. `security` is `tls` (from the first byte),
    `starttls` (required) or `none`; without a login, `username` is empty."""

    host: str
    port: int
    security: str
    username: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Listener:
    """An address to listen at. Without a host, nothing listens; port 0 is any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if host else "off"


def texts(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def whole(lowest: int, highest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # No setting needs more than ten digits. Check the length first, because `int` refuses thousands of digits with
        # an error of its own.
        if not text.isascii() or not text.isdigit() or len(text) > 10 or not lowest <= int(text) <= highest:
            raise ValueError(f"must be a whole number from {lowest} to {highest}")
        return int(text)

    return parse


def number(lowest: float, highest: float, unit: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not lowest <= found <= highest:
            raise ValueError(f"must be a number of {unit} from {lowest:g} to {highest:.10g}")
        return found

    return parse


seconds: Final = partial(number, unit="seconds")
rate: Final = number(0.1, 1_000_000, "emails per second")


def off_or_seconds(lowest: float, highest: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            return 0.0 if text in ("0", "off") else seconds(lowest, highest)(text)
        except ValueError as error:
            raise ValueError(f"{error}, or 0 for never") from None

    return parse


_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def off_or_duration(lowest: float, highest: float) -> Callable[[str], float]:
    """Returns a parser of a duration, such as `90`, `30m`, `4h` or `off`. The value is in seconds; 0 means off."""

    def parse(text: str) -> float:
        number, unit = (text[:-1], text[-1]) if text[-1:] in _UNIT_SECONDS else (text, "s")
        try:
            found = 0.0 if text in ("0", "off") else float(number) * _UNIT_SECONDS[unit]
        except ValueError:
            found = float("nan")
        if found != 0.0 and not lowest <= found <= highest:
            raise ValueError(
                f"must be a number of seconds from {lowest:g} to {highest:.10g}, or a number with the unit s, m, h or "
                "d, such as 4h; or off"
            )
        return found

    return parse


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"must be one of: {', '.join(allowed)}")
        return text.lower()

    return parse


def choices(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    """A parser of a comma-separated list of allowed values. Repeated values count once."""
    one = choice(*allowed)
    return lambda text: tuple(dict.fromkeys(map(one, texts(text))))


def switch(text: str) -> bool:
    if text.lower() not in ("on", "off", "true", "false", "yes", "no", "1", "0"):
        raise ValueError("must be on or off")
    return text.lower() in ("on", "true", "yes", "1")


def worker_count(text: str) -> int:
    if text.lower() == "auto":
        return max(1, len(os.sched_getaffinity(0)))
    try:
        return whole(1, 256)(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def schema_name(text: str) -> str:
    """Parses a schema name of characters that need no quotes in SQL. Accepts SQL keywords, too."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", text) or text.startswith("pg_") or text == "information_schema":
        raise ValueError(
            "must be a schema name: a lower-case letter or underscore, then up to 62 lower-case letters, digits or "
            "underscores; information_schema, and names that begin with pg_, are not allowed"
        )
    return text


def _split_url(text: str) -> SplitResult:
    """Like `urlsplit`, but raises ValueError if the port is not a number from 1 to 65535."""
    parts = urlsplit(text)
    if parts.port == 0:
        raise ValueError
    return parts


def url(*schemes: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        example = f"{schemes[0]}://user:password@host:port/…"
        raw = re.search(r"[/?#\[\]](?=.*@)", text.partition("://")[2])
        unescaped = raw and f"has a {raw[0]} in the user or password; write it as {quote(raw[0], safe='')}"
        try:
            parts = _split_url(text)
        except ValueError:
            raise ValueError(unescaped or f"is not a URL; use the form {example}") from None
        if parts.scheme not in schemes or not (parts.hostname or parts.scheme.startswith("postgres")):
            beginnings = " or ".join(f"{scheme}://" for scheme in schemes)
            raise ValueError(f"must be a URL that begins with {beginnings}, such as {example}")
        is_cut = "@" in parts.path + parts.fragment and "@" not in parts.netloc
        if unescaped and (is_cut or "smtp" in schemes):  # the other URLs can contain an @ in their path or query
            # Refuse such a URL. Otherwise, a part of the password would be parsed as the host, and every error would
            # show that part.
            raise ValueError(unescaped)
        return text

    return parse


def addresses(text: str) -> list[str]:
    """Splits a comma-separated list of URLs, but only at commas before a scheme: passwords can contain commas."""
    return re.split(r"\s*,\s*(?=[a-z]+://)", text)


def urls(*schemes: str) -> Callable[[str], str]:
    """Returns a parser that checks one URL, or a comma-separated list of URLs, and returns the text unchanged."""
    one = url(*schemes)

    def parse(text: str) -> str:
        for each in addresses(text):
            if "," in (urlsplit(one(each)).hostname or ""):
                raise ValueError(
                    f"has several hosts in one URL; write a complete URL for each node: {schemes[0]}://…,{schemes[0]}://…"
                )
        return text

    return parse


def database_url(text: str) -> str:
    """Checks a database's address, in libpq's URL (with one or several hosts) or keyword form; returns it unchanged."""
    if "://" not in text and "=" in text:
        return text
    parts = re.fullmatch(r"([^/]*//(?:[^/?#]*@)?)([^/?#]*)(.*)", text, re.DOTALL)
    before, hosts, after = parts.groups() if parts else ("", text, "")
    if before.count("@") > 1:
        # libpq would treat the text after the first @ as the host. Its errors would show a part of the password.
        raise ValueError("has an @ in the user or password; write it as %40")
    for host in hosts.split(","):
        url("postgresql", "postgres")(f"{before}{host}{after}")
    return text


def smtp_url(text: str) -> SmtpServer:
    parts = urlsplit(url("smtp", "smtps")(text))
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    plain = options.pop("tls", None)
    if options or parts.path not in ("", "/") or parts.fragment or plain not in (None, "none"):
        raise ValueError("must have no path and no option except `?tls=none`, and no #fragment")
    if parts.scheme == "smtps" and plain:
        raise ValueError("has `?tls=none`, which contradicts `smtps://` (TLS from the first byte)")
    host = parts.hostname or ""
    if plain and parts.password and host not in LOOPBACKS:
        raise ValueError(
            "has `?tls=none`, which would send the password without encryption; use STARTTLS (`smtp://`) or `smtps://`"
        )
    security = "tls" if parts.scheme == "smtps" else "none" if plain else "starttls"
    port = parts.port or {"tls": 465, "starttls": 587, "none": 25}[security]
    return SmtpServer(host, port, security, unquote(parts.username or ""), unquote(parts.password or ""))


_FULL_NAME: Final = re.compile(
    r"(?i)(?=.{4,253}\Z)(?:(?!-)[a-z0-9-]{1,63}(?<!-)\.)+(?![0-9]+\Z)(?!-)[a-z0-9-]{1,63}(?<!-)"
)


def full_name_of_this_host() -> str:
    """This host's name if it is a full name in DNS (with a domain); otherwise an empty text."""
    name = socket.gethostname().rstrip(".")
    return name if _FULL_NAME.fullmatch(name) and not name.endswith((".localdomain", ".localhost")) else ""


def ehlo_name(text: str) -> str:
    if not (_FULL_NAME.fullmatch(text) or re.fullmatch(r"\[(?:IPv6:)?[0-9A-Fa-f.:]{3,45}\]", text)):
        raise ValueError("must be the full name of this host in DNS, such as mail.example.com, in ASCII; or [address]")
    return text


def _https_url(text: str, danger: str) -> SplitResult:
    parts = urlsplit(url("https", "http")(text))
    if parts.scheme == "http" and parts.hostname not in LOOPBACKS:
        raise ValueError(f"would {danger} without encryption; use https://")
    return parts


def https_host(text: str) -> str:
    parts = _https_url(text, "send the API key")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError("must have only scheme, host and port, such as https://api.sendgrid.com")
    return f"{parts.scheme}://{parts.netloc}"


def endpoint(text: str) -> str:
    parts = _https_url(text, "send emails")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("must have no user, password, ?query or #fragment; configure credentials for boto3 instead")
    return text


def callback_url(text: str) -> str:
    """Parses a public URL without a query. It may have a user and a password. The URL must begin with https://, except
    for loopback addresses."""
    parts = _https_url(text, "receive the status of SMS")
    if parts.query or parts.fragment:
        raise ValueError("must have no ?query or #fragment, because the dispatcher adds a query")
    return text


def twilio_sid(prefix: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(f"{prefix}[0-9a-f]{{32}}", text):
            raise ValueError(f"must be {prefix} followed by 32 hexadecimal digits")
        return text

    return parse


def sms_sender(text: str) -> str:
    from dispatcher.domain.sms import Sms  # loaded late, because few commands need it

    try:
        return Sms.checked_sender(text)
    except InvalidEmail as error:
        raise ValueError(error.reason) from None


def countries(text: str) -> frozenset[str] | None:
    """Parses ISO 3166 codes of countries, comma-separated; None for `all`."""
    from phonenumbers import SUPPORTED_REGIONS  # loaded late, because few commands need it

    if text.lower() == "all":
        return None
    found = frozenset(texts(text.upper()))
    if not found or not found <= SUPPORTED_REGIONS:
        raise ValueError("must be two-letter codes of countries (ISO 3166), such as DE,AT,GB, or all")
    return found


def issuer(text: str) -> str:
    parts = _https_url(text, "send the client secret")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("must have no user, password, ?query or #fragment")
    return text


def webhook_url(text: str) -> str:
    try:
        parts = _split_url(text)
    except ValueError:
        raise ValueError("is not a URL; use the form https://host/path") from None
    # Without https, others on the network could read the alert, or receive it instead of the server in the URL.
    if parts.scheme != "https" or not parts.hostname or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("must be a URL that begins with https://, such as https://host/path")
    if parts.username is not None or parts.fragment:
        raise ValueError("must have no user, password or #fragment; a signature authenticates our requests")
    return text


def webhook_secret(text: str) -> str:
    remedy = "create one with: echo whsec_$(openssl rand -base64 32)"
    try:
        octets = len(base64.b64decode(text.removeprefix("whsec_"), validate=True))
    except (binascii.Error, ValueError):
        octets = 0
    if not text.startswith("whsec_") or not 24 <= octets <= 64:
        raise ValueError(f"must be whsec_ followed by 24 to 64 bytes in base64; {remedy}")
    return text


def mailbox(text: str) -> str:
    from dispatcher.domain.address import parse_address  # loaded late, because few commands need it

    try:
        address = parse_address(text)
    except ValueError as error:
        raise ValueError(f"is not an address such as alerts@example.com: {error}") from None
    if address.display_name or not text.isascii():
        raise ValueError("must be an ASCII address without a display name, such as alerts@example.com")
    return address.spec


def mailboxes(text: str) -> tuple[str, ...]:
    found = tuple(map(mailbox, texts(text)))
    if not found:
        raise ValueError("must have at least one address")
    return found


def recipients(text: str) -> tuple[str, ...]:
    """Parses addresses, domains and beginnings of phone numbers, comma-separated; empty for `none`."""
    from dispatcher.domain.suppression import Recipient  # loaded late, because few commands need it

    def one(each: str) -> str:
        if re.fullmatch(r"\+[1-9][0-9 ]{0,20}", each):
            return each.replace(" ", "")
        try:
            return Recipient.parse(each).text
        except InvalidEmail as error:
            raise ValueError(f"has an entry whose {error.field} {error.reason}") from None

    found = () if text.lower() == "none" else texts(text)
    if not found and text.lower() != "none":
        raise ValueError("must have at least one address, domain or phone number, or be none")
    return tuple(map(one, found))


def domains(text: str) -> tuple[str, ...]:
    if wrong := [each for each in texts(text) if not _FULL_NAME.fullmatch(each)]:
        raise ValueError(f"has {wrong[0]!r}, which is not a full domain in ASCII, such as example.com")
    return tuple(each.lower() for each in texts(text))


def name(letters: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(f"[{letters}]{{1,64}}", text):
            raise ValueError(f"must be 1 to 64 of the characters {letters}")
        return text

    return parse


def api_key(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("has a space, a line break or another character that API keys never have")
    return text


def listener(text: str) -> Listener:
    if text.lower() == "off":
        return Listener("", 0)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 <= int(port) <= 65535:
        raise ValueError("must be host:port, such as 127.0.0.1:9464 or [::1]:9464, or off")
    return Listener(host, int(port))


def account_rules(text: str) -> AccountRules:
    from dispatcher.domain.accounts import parse_rules  # loaded late, because few hosts have rules

    return parse_rules(text)


def built_in_providers() -> tuple[str, ...]:
    """The names of the built-in providers: the modules and packages of dispatcher/providers that contain a provider."""
    found = pkgutil.iter_modules([str(Path(__file__).parent.parent / "providers")])
    names = {module.name for module in found} - {"contract", "registry", "capabilities", "http_provider"}
    return tuple(sorted(name.replace("_", "-") for name in names))


def provider_names(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of providers or accounts. `config.plugins` checks whether the providers exist."""
    names = texts(text.lower())
    if not names or len(set(names)) != len(names):
        raise ValueError("must list at least one provider, and each provider only once")
    return names


def lane_names(text: str) -> tuple[str, ...]:
    lanes = tuple(dict.fromkeys(texts(text)))
    if not all(map(LANE.fullmatch, lanes)):
        raise ValueError(
            "must be a comma-separated list of lanes; each is 1 to 32 lower-case letters, digits or _, and begins with "
            "a letter"
        )
    if NORMAL not in lanes:
        raise ValueError(f"must contain {NORMAL}, the lane of emails for which no other lane is set")
    return lanes


def queue_name(text: str) -> str:
    if not 1 <= len(text.encode()) <= 200 or not text.isprintable() or text.startswith("amq."):
        raise ValueError("must be 1 to 200 printable characters and not begin with `amq.`")
    return text


def host_name(text: str) -> str:
    """Parses this host's name for rows and logs. `auto` is the machine's name, made valid and short."""
    if text.lower() == "auto":
        found = socket.gethostname()
        name = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in found)
        # Kubernetes pods' names differ only at the end, so a long name is cut and gets a hash of the whole name.
        return name if len(name) <= 28 else f"{name[:19]}-{hashlib.sha256(os.fsencode(found)).hexdigest()[:8]}"
    if not re.fullmatch(r"[A-Za-z0-9.-]{1,28}", text):
        raise ValueError("must be 1 to 28 letters, digits, dots or hyphens, or auto")
    return text


def path_of(text: str) -> Path:
    """Makes a path absolute, and expands a `~` at the beginning. Raises ValueError for the home of an unknown user."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError("begins with the home folder of a user who does not exist") from None


def run_folder(text: str) -> Path:
    """Parses a folder. `auto` is a folder for persistent state, in which nothing deletes old files."""
    if text.lower() != "auto":
        return path_of(text)
    if os.getuid() == 0:
        return Path("/var/lib/email-dispatcher")
    try:
        return path_of(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "email-dispatcher"
    except ValueError:  # the user has no home directory, as in some containers
        return Path("/var/lib/email-dispatcher")


def certificates(text: str) -> Path:
    """Parses the path of a readable file with at least one PEM certificate."""
    path = path_of(text)
    try:
        if not path.is_file():
            raise ValueError("is the path of a file that does not exist")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise ValueError("is the path of a file without PEM certificates") from None
    except OSError as error:
        words = (error.strerror or type(error).__name__).lower()
        raise ValueError(f"is the path of a file that cannot be read: {words}") from None
    return path


def api_listener(text: str) -> Listener:
    """Parses an address to listen at. Refuses `off`."""
    found = listener(text)
    if not found.host:
        raise ValueError("must be host:port; off is not allowed. If you need no such server, do not start it")
    return found


def header_names(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of header names. Refuses patterns such as X-*, and names that are reserved."""
    from dispatcher.domain.headers import is_reserved  # loaded late, because few commands need it

    found = names("A-Za-z0-9_.-")(text)
    if wrong := [name for name in found if is_reserved(name)]:
        raise ValueError(f"has {wrong[0]}, a header that an email may never set")
    return found


def secrets(text: str) -> tuple[str, ...]:
    return tuple(map(api_key, texts(text)))


def names(letters: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = texts(text)
        if wrong := [name for name in names if not re.fullmatch(f"[{letters}]+", name)]:
            raise ValueError(f"has {wrong[0]!r}, but names may have only the characters {letters}")
        return names

    return parse
