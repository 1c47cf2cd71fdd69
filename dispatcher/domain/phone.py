"""Checks phone numbers with the library phonenumbers, which contains the ranges of numbers that countries assign.

The library's data may be out of date. So a number outside these ranges is *unlikely*, but may exist, and is accepted.
"""

from __future__ import annotations

import re
from typing import Final

from dispatcher.errors import InvalidEmail

_NUMBER: Final = re.compile(r"\+[0-9][0-9 ()./-]{1,38}", re.ASCII)
_FAULT: Final = "must be a phone number with its country code, such as +4915112345678"


def phone_number(field: str, text: str) -> str:
    """The number in E.164, without spaces and punctuation.

    Raises:
        InvalidEmail: The text is not a number with a country code, or its country has no numbers of this length.
    """
    import phonenumbers  # Imported here, because its tables load slowly and most processes check no number.

    if not _NUMBER.fullmatch(text):
        raise InvalidEmail(field, _FAULT)
    try:
        number = phonenumbers.parse(text, None)
    except phonenumbers.NumberParseException:
        raise InvalidEmail(field, _FAULT) from None
    if not phonenumbers.is_possible_number(number):
        raise InvalidEmail(field, "is not a possible phone number: it has too few or too many digits for its country")
    return phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)


def is_likely(number: str) -> bool:
    """Whether the number, in E.164, is in a range that its country is known to assign."""
    import phonenumbers

    return phonenumbers.is_valid_number(phonenumbers.parse(number, None))
