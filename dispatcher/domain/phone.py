"""Checks phone numbers with the library phonenumbers, which contains the ranges of numbers that countries assign.

The library's data may be out of date. So a number outside these ranges is *unlikely*, but may exist, and is accepted.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from phonenumbers import PhoneNumber

NUMBER_PATTERN: Final = r"^\+[0-9][0-9 ()./-]{1,38}$"
"""What a number looks like. Not every such text is a number."""
_NUMBER: Final = re.compile(NUMBER_PATTERN, re.ASCII)
_FAULT: Final = "must be a phone number with its country code, such as +4915112345678"
_FORMS: Final = tuple(
    (re.compile(pattern, re.ASCII), form)
    for pattern, form in (
        (r"\+521(\d{10})", r"+52\1"),  # Mexico: until 2019, callers from abroad dialled a 1 before a mobile number
        (r"\+54([1-8]\d{9})", r"+549\1"),  # Argentina: callers from abroad dial a 9 before a mobile number
        (r"\+55([1-9]\d)([6-9]\d{7})", r"+55\g<1>9\2"),  # Brazil: mobile numbers of eight digits got a 9 until 2016
        (r"\+229(\d{8})", r"+22901\1"),  # Benin: since 2024, 01 precedes all numbers
    )
)
"""The numbers that networks write in two forms, and their present form."""
_COSTLY: Final = MappingProxyType(
    {
        "PREMIUM_RATE": "a premium-rate number",
        "SHARED_COST": "a shared-cost number",
        "PERSONAL_NUMBER": "a personal number, whose calls are forwarded",
        "PAGER": "a pager's number",
        "UAN": "a company's universal access number",
        "VOICEMAIL": "a voicemail number",
    }
)
"""The kinds of numbers for which networks may charge much more, by their names in phonenumbers."""
_NO_COUNTRY: Final = "001"
"""What phonenumbers reports for a calling code of no country, such as that of a satellite network."""


def comparable_number(number: str) -> str:
    """The only form of a number, in E.164, in which numbers are compared. Networks may report a number in another form
    than the form to which the SMS was sent."""
    for pattern, form in _FORMS:
        if found := pattern.fullmatch(number):
            return found.expand(form)
    return number


def phone_number(field: str, text: str) -> str:
    """The number in E.164. Raises InvalidEmail: it has no country code, or its country has no numbers of this
    length."""
    return _in_e164(_parsed(field, text))


def sms_number(field: str, text: str) -> tuple[str, str | None]:
    """The number in E.164, and the ISO 3166 code of its country; None if several countries share the calling code and
    none is known to assign the number. Raises InvalidEmail, also if an SMS to it may cost much more than others."""
    import phonenumbers

    number = _parsed(field, text)
    kind = phonenumbers.PhoneNumberType.to_string(phonenumbers.number_type(number))
    why = f"is {_COSTLY[kind]}" if kind in _COSTLY else None
    if (country := phonenumbers.region_code_for_number(number)) == _NO_COUNTRY:
        why = f"has the calling code +{number.country_code}, which belongs to no country"
    if why:
        raise InvalidEmail(field, f"{why}: an SMS to it may cost much more, and is never sent; use a mobile number")
    return _in_e164(number), country


def is_likely(number: str) -> bool:
    """Whether the number, in E.164, is in a range that its country is known to assign."""
    import phonenumbers

    return phonenumbers.is_valid_number(phonenumbers.parse(number, None))


def _parsed(field: str, text: str) -> PhoneNumber:
    import phonenumbers  # Imported here, because its tables load slowly and most processes check no number.

    if not _NUMBER.fullmatch(text):
        raise InvalidEmail(field, _FAULT)
    try:
        number = phonenumbers.parse(text, None)
    except phonenumbers.NumberParseException:
        raise InvalidEmail(field, _FAULT) from None
    if not phonenumbers.is_possible_number(number):
        if (present := comparable_number(found := _in_e164(number))) != found:
            return _parsed(field, present)
        raise InvalidEmail(field, "is not a possible phone number: it has too few or too many digits for its country")
    return number


def _in_e164(number: PhoneNumber) -> str:
    import phonenumbers

    return phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)
