"""Decides whether an SMS from a recipient asks for no more SMS (STOP), or for SMS again (START).

STOP: the first sentence consists of words for STOP, and of words of courtesy such as "please". If in doubt, it is STOP:
an unwanted SMS is worse than a missing one, and START ends the suppression. "Please stop by at 5" is not STOP.
START: the whole text consists of such words.
Punctuation, emoji, digits, accents and case do not matter. docs/sms.md has the words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from itertools import chain
from typing import Final
from unicodedata import normalize

_ENGLISH: Final = (
    "stop stopall unsubscribe cancel end quit optout revoke",
    "start unstop resume optin subscribe",
    "please pls plz thanks thank you now all it this the these me us sending texting sms text texts message messages",
)
_FRENCH: Final = "arret arreter desabonner desinscrire", "reprendre", "svp s il vous plait merci"
_GERMAN: Final = "stopp abmelden abbestellen", "anmelden", "bitte danke"
_SPANISH: Final = "baja parar alto cancelar", "alta iniciar", "por favor gracias"
_PORTUGUESE: Final = "pare parar sair cancelar", "voltar iniciar", "por favor obrigado obrigada"
_NORDIC: Final = "stopp stoppa avsluta avslutt afmeld lopeta", "starta", "tack takk tak kiitos"
_ITALIAN: Final = "ferma annulla cancella disiscrivi", "inizia", "per favore grazie"
_DUTCH: Final = "stoppen afmelden uitschrijven", "aanmelden", "aub alstublieft bedankt"
_POLISH: Final = "rezygnuje koniec", "", "prosze dziekuje"
_SPANISH_AMERICA: Final = "51 52 53 54 56 57 58 502 503 504 505 506 507 591 593 595 598"
_LANGUAGES: Final[Mapping[str, tuple[tuple[str, str, str], ...]]] = {
    "1": (_SPANISH, _FRENCH),  # Canada requires ARRET
    "7": (("стоп", "старт", "спасибо"),),
    "31": (_DUTCH,),
    "32": (_DUTCH, _FRENCH, _GERMAN),
    "33": (_FRENCH,),
    "34": (_SPANISH,),
    "39": (_ITALIAN,),
    "41": (_GERMAN, _FRENCH, _ITALIAN),
    "43": (_GERMAN,),
    "49": (_GERMAN,),
    "55": (_PORTUGUESE,),
    "86": (("td 退订", "", "谢谢"),),
    "351": (_PORTUGUESE,),
    "352": (_FRENCH, _GERMAN),
    "972": (("הסר", "", ""),),
    **dict.fromkeys(("45", "46", "47", "358"), (_NORDIC,)),
    "48": (_POLISH,),
    **dict.fromkeys(_SPANISH_AMERICA.split(), (_SPANISH,)),
}
"""The words for STOP, for START, and of courtesy, by country calling code, in addition to English. In lower case,
without accents."""


class Reply(Enum):
    """What a recipient's SMS asks for."""

    STOP = auto()
    START = auto()


def reply_in(text: str, number: str) -> Reply | None:
    """What an SMS asks for; None if it is neither STOP nor START.

    Args:
        number: The recipient's number in E.164. Its country determines the languages.
    """
    local = next((found for end in (2, 3, 4) if (found := _LANGUAGES.get(number[1:end]))), ())
    stop, start, courtesy = (set(" ".join(words).split()) for words in zip(_ENGLISH, *local, strict=True))
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
