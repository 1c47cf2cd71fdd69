"""The country of a number, and the kinds of numbers to which no SMS is sent."""

from __future__ import annotations

import pytest

from dispatcher import InvalidEmail, Sms
from dispatcher.domain.phone import sms_number
from dispatcher.domain.sms import SmsRules

COSTLY = {
    "+449098790000": "premium-rate",
    "+19002345678": "premium-rate",
    "+499001234567": "premium-rate",
    "+33899123456": "premium-rate",
    "+37190012345": "premium-rate",
    "+448712345678": "premium-rate",
    "+491801123456": "shared-cost",
    "+41840123456": "shared-cost",
    "+447012345678": "personal",
    "+15002345678": "personal",
    "+447640123456": "pager",
    "+4916412345": "pager",
    "+445512345678": "universal access",
    "+979123456789": "+979, which belongs to no country",
    "+881612345678": "+881, which belongs to no country",
    "+870773111632": "+870, which belongs to no country",
    "+883510012345": "+883, which belongs to no country",
    "+88351000000000": "+883, which belongs to no country",  # not assigned
}


@pytest.mark.parametrize(("number", "kind"), COSTLY.items())
def test_an_sms_to_a_number_that_costs_more_is_refused_without_repeating_the_number(number: str, kind: str) -> None:
    with pytest.raises(InvalidEmail) as caught:
        Sms(message_key="k", to=number, text="t")

    assert caught.value.field == "to"
    assert kind in caught.value.reason
    assert number[1:] not in str(caught.value)


@pytest.mark.parametrize("number", COSTLY)
def test_all_countries_do_not_include_numbers_that_cost_more(number: str) -> None:
    fault = SmsRules(countries=None).fault(number, "t")

    assert fault is not None
    assert fault.field == "to"


@pytest.mark.parametrize("number", ["+4980012345678", "+18005550199"])
def test_a_toll_free_number_costs_no_more(number: str) -> None:
    assert SmsRules().fault(number, "t") is None


@pytest.mark.parametrize(
    ("number", "country"),
    [
        ("+4915112345678", "DE"),
        ("+491000000000", "DE"),  # not assigned, but +49 belongs to one country
        ("+14155550100", "US"),
        ("+14165550100", "CA"),
        ("+18765551234", "JM"),
        ("+18095551234", "DO"),
        ("+12425551234", "BS"),
        ("+447400123456", "GB"),
        ("+447700900123", None),  # not assigned, and 4 countries share +44
        ("+447781123456", "GG"),
        ("+79161234567", "RU"),
        ("+77012345678", "KZ"),
        ("+15551234567", None),  # not assigned, and 25 countries share +1
    ],
)
def test_the_country_is_that_of_the_number_and_not_of_the_calling_code(number: str, country: str | None) -> None:
    assert sms_number("to", number) == (number, country)
    allowed = SmsRules(countries=frozenset({"DE", "US", "CA", "GB", "RU"})).fault(number, "t")
    assert (allowed is None) == (country in {"DE", "US", "CA", "GB", "RU"})
    assert SmsRules(countries=None).fault(number, "t") is None


def test_a_refused_country_is_named_with_the_setting_and_the_remedy() -> None:
    fault = SmsRules(countries=frozenset({"US"})).fault("+18765551234", "t")

    assert str(fault) == (
        "to: is a number of JM, which DISPATCHER_SMS_COUNTRIES (default: the default senders' countries) does not "
        "allow; add JM on all hosts"
    )


@pytest.mark.parametrize("to", ["", "0151", "ann@example.org", "+0", "+49 151 12345678x12"])
def test_a_row_with_a_text_that_is_no_number_is_refused(to: str) -> None:
    fault = SmsRules().fault(to, "t")

    assert fault is not None
    assert fault.field == "to"
