"""Limit the emails that the provider smtp sends to a recipient domain: per second, and at the same time.

Use this if a recipient's mail servers limit how many emails or connections they accept from you. The ceilings apply
to all hosts together. An email that must wait becomes `waiting`, and its worker continues with other emails. So a
waiting email does not delay emails to other domains. The ceilings do not apply to the providers sendgrid, ses and
resend, which deliver at their own pace.
"""

from __future__ import annotations

from typing import ClassVar, Final

from dispatcher.actions.action import Change, Listing, Refusal, field
from dispatcher.domain.controls import MAX_CONCURRENT, MOST_WAITING, DomainLimit, LimitedDomain
from dispatcher.domain.kinds import LIMIT, Kind, whole
from dispatcher.errors import InvalidEmail


def _domain(value: object) -> str:
    """A domain in the form in which the domains of recipients are compared."""
    from dispatcher.domain.suppression import Recipient
    from dispatcher.store.comparable_address import comparable_domain

    if not isinstance(value, str):
        raise TypeError
    if "@" in (bare := value.strip().removeprefix("@")):
        raise InvalidEmail("domain", "contains an @; write only the part after the @, such as example.org")
    return comparable_domain(Recipient.parse(f"@{bare}").text)


DOMAIN: Final = Kind(
    "must be a domain", {"type": "string", "minLength": 3, "maxLength": 255}, _domain, metavar="DOMAIN"
)


class ListDomains(Listing[LimitedDomain], name="domains list", http="GET /v1/domains", query="count_domain_waits"):
    """List the domains that have ceilings. Also counts the emails that wait for each domain, up to 10,000."""

    nothing = "No recipient domain has a ceiling."
    constants: ClassVar = {"most": MOST_WAITING}
    examples = ("domains list", "domains list --json | jq '.domains[] | select(.waiting > 0)'")


class SetDomain(Change[DomainLimit], name="domains set", http="PUT /v1/domains/{domain}", query="set_domain_limit"):
    """Set the ceilings of a recipient domain. All hosts apply them within two seconds. Values that you leave out stay.

    DOMAIN is the part of the addresses after the @, without subdomains: example.org does not include
    mail.example.org. An email to several domains with ceilings counts for each of them, and waits until all of them
    allow it.
    """

    domain: str = field(DOMAIN, "The domain, without subdomains.")
    per_second: float | None = field(LIMIT, "The most emails per second: 0.1 is one in ten seconds.", default=None)
    concurrent: int | None = field(
        whole(1, MAX_CONCURRENT), "The most emails that are transmitted at the same time.", default=None
    )

    some_of = ("per_second", "concurrent")
    needs_reason = False
    tells_row = True
    done = "All hosts apply the ceilings within two seconds."
    examples = (
        "domains set example.org --per-second 5",
        'domains set example.org --concurrent 2 --reason "their postmaster asked"',
    )


class RemoveDomain(
    Change[DomainLimit], name="domains unset", http="DELETE /v1/domains/{domain}", query="remove_domain_limit"
):
    """Remove the ceilings of a recipient domain. Emails that wait for them become due within two seconds."""

    domain: str = field(DOMAIN, "The domain, without subdomains.")

    refusals = (Refusal("no-ceiling", "not-found", "{domain} has no ceiling.", "See `dispatcher domains list`."),)
    needs_reason = False
    done = "The domain has no ceiling any more."
    former = "remove"
    examples = ("domains unset example.org",)


ACTIONS = (ListDomains, SetDomain, RemoveDomain)
