"""Decides whether an SMS from a recipient asks for no more SMS (STOP), or for SMS again (START).

STOP: the first sentence has a word for STOP, and otherwise only words of courtesy. If in doubt, it is STOP: an unwanted
SMS is worse than a missing one, and START ends the suppression. START: the same is true of the whole text, or the text
is YES. Punctuation, emoji, digits, accents and case do not matter.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from itertools import chain
from typing import Final
from unicodedata import normalize

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
    sentences = [words for part in re.split(r"[.!?\n]", plain) if (words := _words(part))]
    if not sentences:
        return None
    if _asks(sentences[0], stop, courtesy):
        return Reply.STOP
    whole = list(chain.from_iterable(sentences))
    return Reply.START if whole == ["yes"] or _asks(whole, start, courtesy) else None


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", re.sub(r"\bopt\W+(?=out\b|in\b)", "opt", text))


def _asks(words: list[str], wanted: set[str], courtesy: set[str]) -> bool:
    return not wanted.isdisjoint(words) and wanted | courtesy >= set(words)
