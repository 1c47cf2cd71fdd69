"""The DNS records of senders, asked from a DNS server on the loopback."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from dns.resolver import Resolver

from dispatcher.config import Settings
from dispatcher.domain.values import replace
from dispatcher.ops.sender_dns import Records, check_senders

Zone = Mapping[str, Sequence[str]]
Serve = Callable[[Zone], Resolver]


def key_of(bits: int = 2048) -> str:
    der = generate_private_key(65537, bits).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(der).decode()


KEY: Final = f"v=DKIM1; k=rsa; p={key_of()}"
GOOD: Final[Zone] = {
    "_dmarc.example.com TXT": ["v=DMARC1; p=reject; sp=none"],
    "s1._domainkey.example.com CNAME": ["s1.domainkey.u1.wl.sendgrid.net."],
    "s1.domainkey.u1.wl.sendgrid.net TXT": [KEY],
    "s2._domainkey.example.com TXT": [KEY],
    "em.example.com TXT": ["other", "v=spf1 include:sendgrid.net ~all"],
    "em.example.com MX": ["10 mx.sendgrid.net."],
    "sendgrid.net TXT": ["v=spf1 ip4:192.0.2.0/24 include:ab.sendgrid.net ~all"],
    "ab.sendgrid.net TXT": ["v=spf1 ip4:198.51.100.0/24 -all"],
}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a DNS server with this zone. It does not answer questions about names with `silent`."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    served: dict[str, Sequence[str]] = {}

    def answer() -> None:
        while True:
            octets, client = server.recvfrom(4096)
            if not octets:
                return
            query = dns.message.from_wire(octets)
            (question,) = query.question
            name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
            if "silent" in name:
                continue
            response = dns.message.make_response(query)
            if target := served.get(f"{name} CNAME"):
                response.answer.append(dns.rrset.from_text(f"{name}.", 60, "IN", "CNAME", *target))
                name = target[0].rstrip(".")
            if rows := served.get(f"{name} {kind}"):
                quoted = [" ".join(f'"{r[i : i + 200]}"' for i in range(0, len(r), 200)) for r in rows]
                texts = quoted if kind == "TXT" else rows
                response.answer.append(dns.rrset.from_text(f"{name}.", 60, "IN", kind, *texts))
            elif not any(each.startswith(f"{name} ") for each in served):
                response.set_rcode(dns.rcode.NXDOMAIN)
            server.sendto(response.to_wire(), client)

    thread = threading.Thread(target=answer)
    thread.start()

    def begin(zone: Zone) -> Resolver:
        served.update(zone)
        resolver = Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], server.getsockname()[1]
        return resolver

    yield begin
    server.sendto(b"", server.getsockname())
    thread.join()
    server.close()


class Case(NamedTuple):
    changed: Mapping[str, Sequence[str] | None]
    subject: str
    detail: str
    remedy: str = ""
    domain: str = "example.com"


SPF_11: Final = [f"v=spf1 include:sendgrid.net {' '.join(f'a:h{n}.example.com' for n in range(9))} -all"]
CASES: Final = {
    "complete": Case({}, "alignment", "DKIM and SPF can pass as example.com"),
    "no DMARC": Case(
        {"_dmarc.example.com TXT": None}, "DMARC", "no record", '_dmarc.example.com TXT "v=DMARC1; p=none'
    ),
    "two DMARC": Case(
        {"_dmarc.example.com TXT": ["v=DMARC1; p=none"] * 1 + ["v=DMARC1; p=reject"]}, "DMARC", "2", "Del"
    ),
    "DMARC of the parent": Case({}, "DMARC", "_dmarc.example.com has the policy none", domain="news.example.com"),
    "invalid DMARC": Case({"_dmarc.example.com TXT": ["v=DMARC1"]}, "DMARC", "no valid policy", "p=none"),
    "no key": Case({"s2._domainkey.example.com TXT": None}, "DKIM", "does not exist", "s2._domainkey.example.com"),
    "revoked": Case({"s2._domainkey.example.com TXT": ["v=DKIM1; p="]}, "DKIM", "revoked", "Publish"),
    "short": Case({"s2._domainkey.example.com TXT": [f"p={key_of()[:40]}"]}, "DKIM", "fewer than 1024 bits", "Publish"),
    "testing": Case({"s2._domainkey.example.com TXT": [f"t=y; {KEY}"]}, "DKIM", "testing mode", "Publish"),
    "no SPF": Case(
        {"em.example.com TXT": None}, "SPF", "no record", 'em.example.com TXT "v=spf1 include:sendgrid.net ~all"'
    ),
    "two SPF": Case({"em.example.com TXT": ["v=spf1 -all", "v=spf1 ~all"]}, "SPF", "2 records", "Merge"),
    "foreign SPF": Case(
        {"em.example.com TXT": ["v=spf1 mx -all"]}, "SPF", "sendgrid.net", "include:sendgrid.net mx -all"
    ),
    "+all": Case(
        {"em.example.com TXT": ["v=spf1 include:sendgrid.net +all"]}, "SPF", "every server", "sendgrid.net ~all"
    ),
    "redirect": Case({"em.example.com TXT": ["v=spf1 redirect=sendgrid.net"]}, "SPF", "2 of 10"),
    "eleven lookups": Case({"em.example.com TXT": SPF_11}, "SPF", "more than 10", "Remove includes"),
    "endless": Case({"ab.sendgrid.net TXT": ["v=spf1 include:sendgrid.net -all"]}, "SPF", "more than 10", "Remove"),
    "no MX": Case({"em.example.com MX": None}, "return path", "no MX", "em.example.com MX 10"),
    "null MX": Case({"em.example.com MX": ["0 ."]}, "return path", "no MX", "em.example.com MX 10"),
    "foreign domain": Case({}, "alignment", "neither", "DKIM key", domain="example.net"),
    "aspf": Case({"_dmarc.example.com TXT": ["v=DMARC1; p=none; aspf=s"]}, "alignment", "DKIM can pass"),
}


def settings() -> Settings:
    return replace(Settings(), providers=("sendgrid",), return_path_domains=("em.example.com",))


@pytest.mark.parametrize("name", CASES)
def test_each_fault_of_a_record_has_the_record_to_publish(serve: Serve, name: str) -> None:
    case = CASES[name]
    zone = {key: rows for key, rows in {**GOOD, **case.changed}.items() if rows is not None}

    found = list(check_senders(settings(), [case.domain], Records(serve(zone), total_seconds=5.0)))

    of_subject = [each for each in found if each.subject == case.subject]
    (finding,) = [each for each in of_subject if not each.is_ok] if case.remedy else of_subject[:1]
    assert case.detail in finding.detail
    assert case.remedy in (finding.remedy or "")
    assert bool(case.remedy) != finding.is_ok
    if name == "complete":
        assert all(each.is_ok for each in found)


RETURN_PATHS: Final = {
    "resend": "Publish: send.example.org TXT",
    "ses": "Set DISPATCHER_RETURN_PATH_DOMAINS",
    "smtp": "Publish: example.org TXT",
}


@pytest.mark.parametrize("provider", RETURN_PATHS)
def test_a_return_path_is_that_of_the_provider(serve: Serve, provider: str) -> None:
    records = Records(serve({"example.com A": ["192.0.2.1"]}), total_seconds=5.0)
    wanted = replace(Settings(), providers=(provider,), sender_domains=("example.org",))

    found = list(check_senders(wanted, [], records))

    assert any(RETURN_PATHS[provider] in (each.remedy or "") for each in found)


def test_a_dns_server_that_does_not_answer_does_not_delay_the_doctor_for_long(serve: Serve) -> None:
    records = Records(serve({}), total_seconds=0.2)

    found = list(check_senders(settings(), [f"silent{n}.example.org" for n in range(30)], records))

    assert {each.subject for each in found} == {"DNS"}
    assert "did not answer about _dmarc.silent0.example.org" in found[0].detail
    assert "the checks took too long" in found[19].detail
    assert "only the first 20 of 30" in found[-1].detail
