"""Checks by DNS whether receivers will believe that emails come from their senders: SPF, DKIM, DMARC, the return path.

    sender domain ─▶ _dmarc.…, and the same of its parents ─▶ policy, and the organizational domain
                  ─▶ SELECTOR._domainkey.… ─▶ a DKIM key; DKIM signs as the sender's domain, so it is aligned
                  ─▶ return path (where bounces go) ─▶ SPF with the provider's include, MX, alignment

RFC 7208 (SPF), RFC 6376 (DKIM), RFC 7489 (DMARC). A receiver needs one aligned mechanism that passes. Needs the library
dnspython (the extra `dns`). All questions together take at most TOTAL_SECONDS.
"""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from dispatcher.config import Settings
from dispatcher.domain.accounts import provider_of
from dispatcher.domain.values import dataclass
from dispatcher.providers.smtp import SmtpSettings
from dispatcher.store.api_keys import ApiKey

if TYPE_CHECKING:
    from dns.resolver import Resolver

QUERY_SECONDS: Final = 3.0
TOTAL_SECONDS: Final = 20.0
MAX_DOMAINS: Final = 20
MAX_SPF_LOOKUPS: Final = 10
"""RFC 7208, section 4.6.4. With more, SPF fails for every email."""
MIN_RSA_OCTETS: Final = 150
"""A key of 1024 bits takes about 160 octets in DER, and one of 768 bits about 126."""
_SPF: Final = re.compile(r"v=spf1(?: |\Z)", re.IGNORECASE)
_TERM: Final = re.compile(r"([+?~-]?)([a-z0-9]+)(?:[:=]([^/\s]*))?.*", re.IGNORECASE)


class ProviderRecords(NamedTuple):
    """What a provider asks its customers to publish, as far as it is the same for all of them."""

    include: str | None = None
    selectors: tuple[str, ...] = ()
    return_path: str | None = None  # before the sender's domain; None: the provider's account decides
    mx: str | None = None  # of the return path


PROVIDERS: Final = {
    "sendgrid": ProviderRecords("sendgrid.net", ("s1", "s2")),
    "ses": ProviderRecords("amazonses.com", mx="feedback-smtp.REGION.amazonses.com"),
    "resend": ProviderRecords("amazonses.com", ("resend",), "send.", "feedback-smtp.REGION.amazonses.com"),
    "smtp": ProviderRecords(return_path=""),
}


@dataclass(frozen=True, slots=True)
class SenderFinding:
    """What DNS says about a sender's domain. `remedy`: the record to publish, if something is missing."""

    domain: str
    subject: str  # SPF, DKIM, DMARC, alignment or return path
    detail: str
    remedy: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.remedy is None


class NoAnswer(Exception):
    """DNS did not answer a question in time."""


class Records:
    """Asks DNS, each question once."""

    def __init__(self, resolver: Resolver, *, total_seconds: float = TOTAL_SECONDS) -> None:
        self._resolver = resolver
        self._until = time.monotonic() + total_seconds
        self._known: dict[tuple[str, str], list[str]] = {}

    def find(self, name: str, kind: str) -> list[str]:
        """The texts of TXT records, or the hosts of MX records; empty if there are none. Raises NoAnswer."""
        if (name, kind) not in self._known:
            self._known[name, kind] = self._ask(name, kind)
        return self._known[name, kind]

    def _ask(self, name: str, kind: str) -> list[str]:
        from dns.exception import DNSException
        from dns.resolver import NXDOMAIN

        left = min(QUERY_SECONDS, self._until - time.monotonic())
        if left <= 0:
            raise NoAnswer("the checks took too long")
        try:
            answer = self._resolver.resolve(f"{name}.", kind, lifetime=left, raise_on_no_answer=False, search=False)
        except NXDOMAIN:
            return []
        except DNSException as error:
            raise NoAnswer(f"DNS did not answer about {name} ({type(error).__name__})") from error
        rows = answer.rrset or ()
        if kind == "TXT":
            return [b"".join(row.strings).decode("utf-8", "replace") for row in rows]
        return [row.exchange.to_text(omit_final_dot=True).lower() for row in rows]

    def spf(self, domain: str) -> list[str]:
        return [text for text in self.find(domain, "TXT") if _SPF.match(text)]


def examine(settings: Settings, keys: Iterable[ApiKey]) -> list[SenderFinding]:
    """Checks the domains of DISPATCHER_SENDER_DOMAINS, and those that valid keys allow. Blocks until DNS has answered,
    at most for TOTAL_SECONDS."""
    domains: set[str] = set()
    for key in keys:
        if key.revoked_at is None and not key.is_test:
            domains |= {each.rpartition("@")[2] for each in key.sender_addresses or ()}
            domains |= key.sender_domains or frozenset()
    if not (domains or settings.sender_domains):
        return []
    try:
        from dns.exception import DNSException
        from dns.resolver import Resolver
    except ImportError:
        words = "SPF, DKIM and DMARC are not checked, because dnspython is not installed"
        return [SenderFinding("all senders", "DNS", words, "Run: pip install 'email-dispatcher[dns]'")]
    try:
        records = Records(Resolver())
    except DNSException as error:
        words = f"SPF, DKIM and DMARC are not checked: this host has no DNS server ({type(error).__name__})"
        return [SenderFinding("all senders", "DNS", words, "Correct /etc/resolv.conf.")]
    return list(check_senders(settings, sorted(domains), records))


def check_senders(settings: Settings, domains: Iterable[str], records: Records) -> Iterator[SenderFinding]:
    """Checks the records of these domains, and of DISPATCHER_SENDER_DOMAINS."""
    wanted = dict.fromkeys((*settings.sender_domains, *domains))
    for domain in list(wanted)[:MAX_DOMAINS]:
        try:
            yield from _check(settings, domain, records)
        except NoAnswer as error:
            yield SenderFinding(domain, "DNS", f"{error}", "Try again, or check /etc/resolv.conf.")
    if len(wanted) > MAX_DOMAINS:
        words = f"only the first {MAX_DOMAINS} of {len(wanted)} domains are checked"
        yield SenderFinding(list(wanted)[MAX_DOMAINS], "DNS", words, "Name fewer in DISPATCHER_SENDER_DOMAINS.")


def _check(settings: Settings, domain: str, records: Records) -> Iterator[SenderFinding]:
    known = {name: PROVIDERS[kind] for name in settings.providers if (kind := provider_of(name)) in PROVIDERS}
    organization, tags, dmarc = _dmarc(domain, records)
    yield dmarc
    keys = list(_dkim(settings, domain, known, records))
    yield from keys
    is_aligned = False
    paths = _return_paths(settings, domain, known)
    for path, names in paths.items():
        includes = list(dict.fromkeys(include for name in names if (include := known[name].include)))
        spf = _spf(domain, path, includes, records)
        yield spf
        yield _mx(domain, path, next((mx for name in names if (mx := known[name].mx)), None), records)
        near = path == domain if tags.get("aspf", "r") == "s" else _is_within(path, organization)
        is_aligned |= near and spf.is_ok
    if unknown := [name for name in known if all(name not in names for names in paths.values())]:
        words = f"the return path of {', '.join(unknown)} is not known, so SPF and MX are not checked"
        remedy = f"Set DISPATCHER_RETURN_PATH_DOMAINS, for example to bounces.{domain}, as configured at the provider."
        yield SenderFinding(domain, "return path", words, remedy)
    has_key = any(each.is_ok for each in keys)
    passing = [name for name, passes in (("DKIM", has_key), ("SPF", is_aligned)) if passes]
    if passing:
        yield SenderFinding(domain, "alignment", f"{' and '.join(passing)} can pass as {domain}, so DMARC can pass")
    elif known:
        words = "neither a DKIM key nor an aligned return path with SPF was found, so DMARC fails"
        yield SenderFinding(domain, "alignment", words, f"Publish the DKIM key of {domain}: most receivers need it.")


def _return_paths(settings: Settings, domain: str, known: dict[str, ProviderRecords]) -> dict[str, list[str]]:
    """The return paths of a sender's emails, and the providers that use each."""
    found: dict[str, list[str]] = {}
    given = settings.return_path_domains
    own = next((each for each in given if _is_within(each, domain)), given[0] if given else None)
    for name, provider in known.items():
        path = own
        smtp = settings.own.get(name)
        if isinstance(smtp, SmtpSettings):
            path = smtp.bounce_address.rpartition("@")[2] or domain
        elif path is None and provider.return_path is not None:
            path = f"{provider.return_path}{domain}"
        if path is not None:
            found.setdefault(path, []).append(name)
    return found


def _dmarc(domain: str, records: Records) -> tuple[str, dict[str, str], SenderFinding]:
    """The organizational domain, the tags of the record, and the finding."""
    labels = domain.split(".")
    publish = f'Publish: _dmarc.{domain} TXT "v=DMARC1; p=none; rua=mailto:dmarc@{domain}"'
    for at in range(len(labels) - 1):
        name = ".".join(labels[at:])
        found = [text for text in records.find(f"_dmarc.{name}", "TXT") if text.lower().startswith("v=dmarc1")]
        if not found:
            continue
        if len(found) > 1:
            words = f"_dmarc.{name} has {len(found)} records, so receivers ignore all"
            return name, {}, SenderFinding(domain, "DMARC", words, "Delete all but one of the TXT records.")
        tags = _tags(found[0])
        policy = tags.get("sp", tags.get("p", "")) if at else tags.get("p", "")
        if policy not in ("none", "quarantine", "reject"):
            return name, tags, SenderFinding(domain, "DMARC", f"_dmarc.{name} has no valid policy (p=)", publish)
        return name, tags, SenderFinding(domain, "DMARC", f"_dmarc.{name} has the policy {policy}")
    return domain, {}, SenderFinding(domain, "DMARC", "no record; Gmail and Yahoo need one for bulk email", publish)


def _dkim(
    settings: Settings, domain: str, known: dict[str, ProviderRecords], records: Records
) -> Iterator[SenderFinding]:
    selectors = settings.dkim_selectors or tuple(
        dict.fromkeys(each for provider in known.values() for each in provider.selectors)
    )
    if not selectors:
        words = "not checked: the selector is not known"
        yield SenderFinding(domain, "DKIM", words, "Set DISPATCHER_DKIM_SELECTORS to the provider's selectors.")
    for selector in dict.fromkeys(selectors):
        name = f"{selector}._domainkey.{domain}"
        found = [text for text in records.find(name, "TXT") if "p=" in text]
        publish = f"Publish the record of {name} (CNAME or TXT) that the provider shows for the domain."
        fault = _key_fault(_tags(found[0])) if found else "does not exist"
        yield SenderFinding(domain, "DKIM", f"{name} {fault or 'has a key'}", publish if fault else None)


def _key_fault(tags: dict[str, str]) -> str | None:
    if not tags.get("p"):
        return "has no key: it was revoked"
    if "y" in tags.get("t", "").split(":"):
        return "is in testing mode (t=y), so receivers may ignore the signature"
    if tags.get("k", "rsa") != "rsa":
        return None
    try:
        octets = len(base64.b64decode(tags["p"], validate=True))
    except ValueError:
        return "has a key that cannot be read"
    return "has a key of fewer than 1024 bits, which receivers ignore" if octets < MIN_RSA_OCTETS else None


def _spf(domain: str, path: str, includes: Sequence[str], records: Records) -> SenderFinding:
    wanted = " ".join(f"include:{each}" for each in dict.fromkeys(includes)) or "a:YOUR-SMTP-SERVER"
    found = records.spf(path)
    if not found:
        return SenderFinding(domain, "SPF", f"{path} has no record", f'Publish: {path} TXT "v=spf1 {wanted} ~all"')
    if len(found) > 1:
        words = f"{path} has {len(found)} records, so SPF fails for every email"
        return SenderFinding(domain, "SPF", words, "Merge the TXT records that begin with v=spf1 into one.")
    (record,) = found
    reached: set[str] = set()
    lookups = _count_lookups(record, reached, records)
    terms = [match for term in record.split()[1:] if (match := _TERM.fullmatch(term))]
    if any(term[2].lower() == "all" and term[1] in ("", "+") for term in terms):
        fixed = re.sub(r"(?i)(?<=\s)\+?all\b", "~all", record)
        return SenderFinding(domain, "SPF", f"{path} allows every server (+all)", f'Publish: {path} TXT "{fixed}"')
    if lookups > MAX_SPF_LOOKUPS:
        words = f"{path} needs more than {MAX_SPF_LOOKUPS} DNS lookups, so SPF fails for every email"
        return SenderFinding(domain, "SPF", words, f"Remove includes that you do not need from the record of {path}.")
    if missing := [each for each in dict.fromkeys(includes) if each not in reached]:
        added = " ".join(f"include:{each}" for each in missing)
        words = f"the record of {path} does not include {', '.join(missing)}"
        remedy = f'Publish: {path} TXT "v=spf1 {added} {record.partition(" ")[2]}"'
        return SenderFinding(domain, "SPF", words, remedy)
    return SenderFinding(domain, "SPF", f"{path}: {lookups} of {MAX_SPF_LOOKUPS} DNS lookups")


def _count_lookups(record: str, reached: set[str], records: Records, count: int = 0) -> int:
    """The DNS lookups that a receiver makes for a record; at most one above the limit. Adds the included domains."""
    for match in map(_TERM.fullmatch, record.split()[1:]):
        name, value = (match[2].lower(), (match[3] or "").lower().rstrip(".")) if match else ("", "")
        if name in ("a", "mx", "ptr", "exists", "include", "redirect"):
            count += 1
        if count > MAX_SPF_LOOKUPS:
            return count
        if name in ("include", "redirect") and value and "%" not in value:
            reached.add(value)
            for inner in records.spf(value)[:1]:
                count = _count_lookups(inner, reached, records, count)
    return count


def _mx(domain: str, path: str, mx: str | None, records: Records) -> SenderFinding:
    hosts = [host for host in records.find(path, "MX") if host.strip(".@")]  # not a null MX (RFC 7505)
    if hosts:
        return SenderFinding(domain, "return path", f"{path} receives bounces at {', '.join(sorted(hosts)[:3])}")
    words = f"{path} has no MX record, so bounces are lost, and some receivers refuse the email"
    return SenderFinding(domain, "return path", words, f"Publish: {path} MX 10 {mx or 'YOUR-MAIL-SERVER'}")


def _tags(record: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in record.split(";"))
    return {name.strip().lower(): "".join(value.split()) for name, _, value in pairs}


def _is_within(domain: str, parent: str) -> bool:
    return domain == parent or domain.endswith(f".{parent}")
