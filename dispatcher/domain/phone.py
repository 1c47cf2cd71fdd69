"""Phone numbers, as the library phonenumbers knows them. Its data is about assigned numbers, and ages: a number that it
does not know may exist, so it is only unlikely."""

from __future__ import annotations

import re
from typing import Final

from dispatcher.errors import InvalidEmail

_NUMBER: Final = re.compile(r"\+[0-9][0-9 ()./-]{1,38}", re.ASCII)
_FAULT: Final = "must be a phone number with its country code, such as +4915112345678"


def phone_number(field: str, text: str) -> str:
    """The number in E.164, without spaces and punctuation.

    Raises:
        InvalidEmail: The text is not a number with a country code, or no number of its country has this length.
    """
    import phonenumbers  # its tables load slowly, and most processes check no number

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
    """Whether an operator is known to assign this number, which is in E.164."""
    import phonenumbers

    return phonenumbers.is_valid_number(phonenumbers.parse(number, None))
