"""Suppressed recipients: addresses and domains that get no email of a tenant, and numbers that get no SMS.

A reply to an SMS asks for no more SMS (STOP) if its first sentence has a word for STOP, and otherwise only words of
courtesy. If in doubt, it is STOP: an unwanted SMS is worse than a missing one, and START ends the suppression. START:
the same is true of the whole text, or the text is YES. Punctuation, emoji, digits, accents and case do not matter.
"""

from __future__ import annotations

import re
from datetime import datetime
from enum import Enum, StrEnum, auto
from itertools import chain
from typing import Final
from unicodedata import normalize
from uuid import UUID

from dispatcher.domain.phone import phone_number
from dispatcher.domain.values import dataclass
from dispatcher.errors import InvalidEmail

RECIPIENT_PATTERN: Final = "[@.+]"
"""Matches every text that `Recipient.parse` accepts: an address, a domain with a dot, or a phone number."""


class SuppressionReason(StrEnum):
    """Why a recipient is suppressed. The value of `suppression.reason`."""

    HARD_BOUNCE = "hard_bounce"
    """The address does not exist or accepts no email."""
    SOFT_BOUNCE = "soft_bounce"
    """Several emails to the address bounced within a few days (DISPATCHER_SUPPRESS_SOFT_BOUNCES)."""
    COMPLAINT = "complaint"
    """The recipient reported an email as spam."""
    UNSUBSCRIBE = "unsubscribe"
    """The recipient unsubscribed."""
    MANUAL = "manual"
    """An operator or an application added the entry."""


@dataclass(frozen=True, slots=True)
class Recipient:
    """An address, a phone number or a whole domain that is or may be suppressed. Must not be logged."""

    text: str  # the address without a display name, the number in E.164, or the domain
    is_domain: bool

    @classmethod
    def parse(cls, text: str) -> Recipient:
        """Parses an address, a domain or a phone number. Raises InvalidEmail, which never repeats the text.

        Examples: `ann@example.org`, `Ann <ann@example.org>`, `example.org`, `@example.org`, `+49 151 12345678`.
        """
        # Imported here, because the settings import this module and need no addresses.
        from dispatcher.domain.address import parse_address

        text = text.strip()
        if text.startswith("+") and "@" not in text:
            return cls(phone_number("number", text), is_domain=False)
        is_domain = text.startswith("@") or "@" not in text
        if is_domain and "." not in text:
            raise InvalidEmail("domain", "has no dot; write an address, or a domain such as example.org")
        try:
            address = parse_address(f"x@{text.removeprefix('@')}" if is_domain else text)
        except ValueError as error:
            raise InvalidEmail("domain" if is_domain else "address", str(error)) from None
        return cls(address.domain if is_domain else address.spec, is_domain)

    @property
    def masked(self) -> str:
        """A shortened form that an operator recognises: `j•••@example.com`, `+49•••78`, or the domain."""
        if self.text.startswith("+") and not self.is_domain and "@" not in self.text:
            return f"{self.text[:3]}•••{self.text[-2:]}"
        local, at, domain = self.text.lower().lstrip('"').rpartition("@")
        return f"{local[:1]}•••{at}{domain}" if at else domain


@dataclass(frozen=True, slots=True)
class Suppression:
    """A suppressed address or domain of a tenant. An address is masked."""

    id: int
    recipient: str  # `j•••@example.com`, or the domain
    is_domain: bool
    kind: SuppressionReason
    topic: str | None  # None: every topic, and emails without topic
    created_at: datetime
    expires_at: datetime | None
    # the email whose event suppressed the recipient; None if no event did: an operator, an application or an import
    # added the entry
    source_email_id: UUID | None
    note: str | None
    tenant_id: str


@dataclass(frozen=True, slots=True)
class AddedSuppressions:
    """How many recipients are suppressed now, and how many were already suppressed for at least as long."""

    added: int
    unchanged: int

    def describe(self) -> str:
        """What was changed, in one sentence."""
        same = f"; {_recipients(self.unchanged)} already suppressed for at least as long" if self.unchanged else ""
        return f"Suppressed {_recipients(self.added)}{same}."


def _recipients(count: int) -> str:
    return f"{count:,} recipient{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class RemovedSuppressions:
    """How many entries were removed, and the failed emails that they had stopped."""

    removed: int
    stopped_count: int
    stopped_email_ids: list[UUID]  # the oldest 1,000, in the order of their ids


AUTOMATIC: Final = (SuppressionReason.HARD_BOUNCE, SuppressionReason.COMPLAINT, SuppressionReason.UNSUBSCRIBE)
"""The reasons for which one event suppresses a recipient by default."""


@dataclass(frozen=True, slots=True)
class SuppressionRules:
    """Which events of providers suppress a recipient."""

    # a single event with one of these reasons suppresses its recipient
    reasons: frozenset[SuppressionReason] = frozenset(AUTOMATIC)
    days: int = 0  # how many days an automatic entry lasts; 0: for ever
    # an address is suppressed after soft bounces of this many emails; 0: soft bounces suppress nothing
    soft_bounces: int = 0
    soft_bounce_days: int = 7  # only the soft bounces of the last `soft_bounce_days` days count


_LANGUAGES: Final = (
    (
        "",
        "stop stopall unsubscribe cancel end quit optout revoke",
        "start unstop resume optin subscribe",
        "please pls plz thanks thank you now all it this the me us sending texting sms text texts message messages",
    ),
    ("1 32 33 41 352", "arret arreter desabonner desinscrire", "reprendre", "svp s il vous plait merci"),
    ("32 41 43 49 352", "stopp abmelden abbestellen", "anmelden", "bitte danke"),
    (
        "1 34 51 52 53 54 56 57 58 502 503 504 505 506 507 591 593 595 598",
        "baja parar alto cancelar",
        "alta iniciar",
        "por favor gracias",
    ),
    ("55 351", "pare parar sair cancelar", "voltar iniciar", "por favor obrigado obrigada"),
    ("45 46 47 358", "stopp stoppa avsluta avslutt afmeld lopeta", "starta", "tack takk tak kiitos"),
    ("39 41", "ferma annulla cancella disiscrivi", "inizia", "per favore grazie"),
    ("31 32", "stoppen afmelden uitschrijven", "aanmelden", "aub alstublieft bedankt"),
    ("48", "rezygnuje koniec", "", "prosze dziekuje"),
    ("7", "стоп", "старт", "спасибо"),
    ("86", "td 退订", "", "谢谢"),
    ("972", "הסר", "", ""),
)
"""Country calling codes, and the words for STOP, for START and of courtesy. In lower case, without accents."""


class Reply(Enum):
    """What a recipient's SMS asks for."""

    STOP = auto()
    START = auto()


def reply_in(text: str, number: str) -> Reply | None:
    """What an SMS asks for; None if it is neither STOP nor START. The number's country determines the languages."""
    spoken = [row[1:] for row in _LANGUAGES if number.startswith(tuple(f"+{code}" for code in row[0].split(" ")))]
    stop, start, courtesy = (set(" ".join(words).split()) for words in zip(*spoken, strict=True))
    plain = "".join(each for each in normalize("NFKD", text.casefold()) if not "\u0300" <= each <= "\u036f")
    joined = (re.sub(r"\bopt\W+(?=out\b|in\b)", "opt", part) for part in re.split(r"[.!?\n]", plain))
    sentences = [words for part in joined if (words := re.findall(r"[^\W\d_]+", part))]
    if not sentences:
        return None
    if _asks(sentences[0], stop, courtesy):
        return Reply.STOP
    whole = list(chain.from_iterable(sentences))
    return Reply.START if whole == ["yes"] or _asks(whole, start, courtesy) else None


def _asks(words: list[str], wanted: set[str], courtesy: set[str]) -> bool:
    return not wanted.isdisjoint(words) and wanted | courtesy >= set(words)
