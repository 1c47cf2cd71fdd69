"""Tests which texts are valid addresses. An error never quotes the address."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispatcher.domain.address import MAX_ADDRESS_OCTETS, Address, is_plain, parse_address

NASTY = st.text('ab.@<>"\\ ,;:()[]-=?\r\n\t\0\x85\u2028\u202e\ud800\uff20ü日\u0301', max_size=30)


def refusal(text: str) -> str | None:
    """The reason why the text is refused; None if it is a valid address."""
    try:
        parse_address(text)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ann@example.org", Address("", "ann", "example.org")),
        ("o'neill+tag=x@mail.example.org", Address("", "o'neill+tag=x", "mail.example.org")),
        ("root@localhost", Address("", "root", "localhost")),
        ("a@x--y.3com.example", Address("", "a", "x--y.3com.example")),
        ("Ann <ann@example.org>", Address("Ann", "ann", "example.org")),
        ("Dr. Ann O'Neill <ann@example.org>", Address("Dr. Ann O'Neill", "ann", "example.org")),
        ("Ann<ann@example.org>", Address("Ann", "ann", "example.org")),
        ('"O\'Neill, Ann (Sales)" <ann@example.org>', Address("O'Neill, Ann (Sales)", "ann", "example.org")),
        ('"ann@home" <ann@example.org>', Address("ann@home", "ann", "example.org")),
        (r'"Ann \"The <b>\" \\ O." <ann@example.org>', Address('Ann "The <b>" \\ O.', "ann", "example.org")),
        ("Jürgen Groß <jürgen@bücher.example>", Address("Jürgen Groß", "jürgen", "bücher.example")),
        ("二葉亭 <二葉亭@例え.テスト>", Address("二葉亭", "二葉亭", "例え.テスト")),
        ("संपर्क@डाटामेल.भारत", Address("", "संपर्क", "डाटामेल.भारत")),
        *((f"ann@{each}", Address("", "ann", each)) for each in ("BÜCHER.example", "cafe\u0301.example", "straße.de")),
        ("二〇@二〇.example", Address("", "二〇", "二〇.example")),
        ("\u200fשרה\u200e <d@example.org>", Address("\u200fשרה\u200e", "d", "example.org")),
        ("Family 👨\u200d👩\u200d👧 <f@example.org>", Address("Family 👨\u200d👩\u200d👧", "f", "example.org")),
        ("i❤️mail@example.org", Address("", "i❤️mail", "example.org")),
    ],
)
def test_an_address_is_split_into_name_local_part_and_domain(text: str, address: Address) -> None:
    assert parse_address(text) == address


REFUSED: dict[str, tuple[str, ...]] = {
    "empty": ("",),
    "starts or ends with a space": (" ", " ann@example.org", "ann@example.org "),
    "no @": ("ann", "undisclosed-recipients:;"),
    "more than one @": ("ann@@example.org", "ann@home@example.org", "Ann <ann@home@example.org>"),
    "nothing before": ("@example.org",),
    "nothing after": ("ann@",),
    "space inside local@domain": (
        *("an n@example.org", "ann@exam ple.org", "Ann < ann@example.org>", "Ann <ann@example.org >"),
        *("ann\u00a0x@example.org", '"ann b"@example.org'),
    ),
    "start or end of its domain": ("ann@.example.org", "ann@example.org.", "ann@example..org"),
    "hyphen": ("ann@-example.org", "ann@example-.org"),
    "domain names do not allow": (
        *("ann@ex_ample.org", "ann@ex*mple.org", "ann@example\u3002org", "ann@example\uff0eorg"),
        *("ann@exam\u200bple.org", "ann@ex\uff41mple.org", "ann@exam\ufb01le.org", "ann@a\u2100b.example"),
        *("ann@\u0301x.example", "ann@💩.example"),
    ),
    "IP address in brackets": ("ann@[192.0.2.1]", "ann@[IPv6:2001:db8::1]"),
    "domain that ends in a number": ("ann@192.0.2.1",),
    "email addresses do not allow": (
        *("a,b@example.org", "a\\b@example.org", "a(x)b@example.org", "..@example.org", '"a,b"@example.org'),
    ),
    "254 bytes": (f"{'ü' * 122}@example.org", f"ann@{'a.' * 126}example", f"ann@{'日本.' * 25}example"),
    "quotes in local@domain": ('"ann"b"@example.org', '""@example.org', '"Ann" ann@example.org'),
    "empty name": ("<ann@example.org>", '"" <ann@example.org>', '"  " <ann@example.org>'),
    "unbalanced": (
        *("Ann <ann@example.org", "Ann ann@example.org>", "Ann <<ann@example.org>>", "Ann <ann@example.org> x"),
        *("Ann <ann@example.org>,b@example.org", "Ann <ann@example.org>, Bob <bob@example.org>"),
        *('"Ann <ann@example.org>', '"Ann" x <ann@example.org>'),
    ),
    "double quotes": (
        *("O'Neill, Ann <ann@example.org>", "Ann (Sales) <ann@example.org>", 'Ann "The" O. <ann@example.org>'),
        "ann@home <ann@example.org>",
    ),
    "control character": (
        *("Ann <ann@example.org>\r\nBcc: x@example.org", "Ann\r\nBcc: x@example.org <ann@example.org>"),
        *('"Ann\r\n Bcc: x" <ann@example.org>', "ann\n@example.org", "ann@example.org\n"),
        *("Ann\x85Bcc: x <ann@example.org>", "Ann\x7f <ann@example.org>", "Ann\t<ann@example.org>", "\0@example.org"),
    ),
    "line break": ("Ann\u2028Bcc: x <ann@example.org>",),
    "reading direction": ("Ann \u202egro.knab <ann@example.org>", "Ann \u2067x\u2069 <ann@example.org>"),
    "surrogate": ("ann\ud800@example.org",),
    "encoded word": (
        *("=?utf-8?q?Ann=0D=0ABcc=3A_x?= <ann@example.org>", r'"=\?utf-8\?q\?Ann=0D=0A\?=" <ann@example.org>'),
        *("=?utf-8?q?x=40y=2Eexample=3E?=@example.org", "=?utf-8?b?DQo@example.org"),
    ),
    "looks like a separator": ("ann\uff20home@example.org", "ann\u037ebob@example.org", "ann\u2024@example.org"),
    "invisible": ("ann\u200b@example.org", "ann\u00ad@example.org"),
    "63 bytes": (f"ann@{'a' * 64}.example", f"ann@{'日本語' * 21}.example"),
    "255 characters": (f"{'A' * 256} <ann@example.org>",),
    "too long": ("a" * 1000 + "@example.org",),
}


@pytest.mark.parametrize(("text", "reason"), [(text, reason) for reason, texts in REFUSED.items() for text in texts])
def test_an_invalid_address_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_address(text)


LONGEST = f"{'a' * 64}@{'b' * 63}.{'c' * 63}.{'d' * (MAX_ADDRESS_OCTETS - 193)}"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (LONGEST, LONGEST),
        ("ann..b@docomo.example.org", '"ann..b"@docomo.example.org'),
        ("ann.@docomo.example.org", '"ann."@docomo.example.org'),
        (".ann@docomo.example.org", '".ann"@docomo.example.org'),
        ("Ann <-.ann-...@docomo.example.org>", '"-.ann-..."@docomo.example.org'),
        ("zoë..@docomo.example.org", '"zoë.."@docomo.example.org'),
        ('"ann..b"@docomo.example.org', '"ann..b"@docomo.example.org'),
        ('"ann.b"@docomo.example.org', "ann.b@docomo.example.org"),
        (f"{'a' * 74}@desk.example.org", f"{'a' * 74}@desk.example.org"),
        (f"{'ü' * 33}@desk.example.org", f"{'ü' * 33}@desk.example.org"),
    ],
)
def test_an_address_that_people_have_is_accepted_and_quoted_where_the_syntax_needs_it(text: str, spec: str) -> None:
    assert parse_address(text).spec == spec


@pytest.mark.parametrize("scheme", ["a.{}", "{}@x", "{}.(@x", "x@{}", '"{}', "{} <x@y.example>", '"{}" <'])
def test_parsing_takes_linear_time(scheme: str) -> None:
    # If a pattern backtracked over these 700 characters, the test would never finish.
    for filling in ("a", "a.", "\\\\", '\\"', "-", "<", "ü"):
        text = scheme.format(filling * (700 // len(filling)))
        with pytest.raises(ValueError, match=r"^(is|has|begins|contains) "):
            parse_address(text)


@given(st.sampled_from(["{}@b.example", "a@{}.example", "{} <a@b.example>", '"{}" <a@b.example>', "{}"]), NASTY)
@settings(max_examples=100)
def test_an_accepted_address_is_valid_in_a_header(scheme: str, filling: str) -> None:
    text = scheme.format(filling)
    if refusal(text):
        return
    address = parse_address(text)
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    local = address.local[1:-1] if address.local.startswith('"') else address.local
    assert not re.search(r'[\s<>"\\,;:()\[\]]', unicodedata.normalize("NFKC", local + address.domain))
    assert unicodedata.normalize("NFKC", address.spec).count("@") == 1


@given(st.one_of(NASTY, st.from_regex(r"[a-z=?.]{1,4}@[a-z0-9.-]{1,6}", fullmatch=True)))
@example(LONGEST)
@example(f"a{LONGEST}")
@settings(max_examples=100)
def test_a_plain_address_needs_no_parsing(text: str) -> None:
    expected = refusal(text) is None and text.isascii() and parse_address(text).spec == text and '"' not in text

    assert is_plain(text) == expected
    assert not is_plain(text) or parse_address(text).spec == text
