"""What the check of a captured email's HTML and links finds."""

from __future__ import annotations

import pytest

from dispatcher.ops.email_check import check

LINKS = [
    ("https://example.com/a?b=c#d", "Open", []),
    ("https://www.example.com/", "example.com/page", []),
    ("mailto:ann@example.org", "Ann", []),
    ("#top", "Top", []),
    ("", "Open", ["is empty"]),
    ("http://example.com/", "Open", ["uses http, not https"]),
    ("https://localhost:8000/", "Open", ["leads to this machine or a private network"]),
    ("https://10.0.0.7/", "Open", ["leads to this machine or a private network"]),
    ("https://evil.example/", "https://bank.example/", ["leads to evil.example, but its text names bank.example"]),
    ("example.com/page", "Open", ["has no scheme, so it leads nowhere in an email"]),
    ("javascript:x()", "Open", ["has the scheme javascript, which mail clients may block"]),
    ("https:///page", "Open", ["has no host"]),
    ("https://[example", "Open", ["is malformed"]),
    ("https://example.com:x/", "Open", ["is malformed"]),
    (
        "https://example.com/{{ token }}",
        "Open",
        ["has a character that a URL cannot have, such as a space or an unfilled placeholder"],
    ),
]


@pytest.mark.parametrize(("url", "text", "problems"), LINKS, ids=[url or "empty" for url, _, _ in LINKS])
def test_a_link_that_leads_nowhere_or_misleads_is_named(url: str, text: str, problems: list[str]) -> None:
    (link,) = check(f'<p>\n<a href="{url}"><b>{text}</b></a>', "Hello").links

    assert (link.url, link.text, link.line, list(link.problems)) == (url, text, 2, problems)


def test_what_mail_clients_do_not_support_is_named_with_its_line() -> None:
    html = """<html><head><style>
    .a { display: flex } .b { background: url(x.png) }
    .c { position: absolute; --background-position: fixed }
    </style></head><body>
    <style>p { color: red }</style>
    <p style="display: grid">Hello</p><script>"<form>"</script><!-- <svg> -->
    <svg></svg><img src="data:image/png;base64,x"><img src="logo.png" alt="">
    <img src="https://example.com/logo.png" alt="Logo">"""

    assert [(each.line, each.subject) for each in check(html, "Hello").findings] == [
        (2, "display: flex"),
        (3, "position"),
        (2, "background image"),
        (5, "<style> in the <body>"),
        (6, "display: grid"),
        (6, "<script>"),
        (7, "<svg>"),
        (7, "<img> without alt"),
        (7, "<img> with data:"),
        (7, "<img> without a URL"),
    ]
    assert [each.subject for each in check("x" * 110_000, " ").findings] == ["size", "text part"]
    assert check(None, "See https://example.com/a.").links[0].url == "https://example.com/a"


@pytest.mark.parametrize(
    "html", ["<![<", "<![if !mso]>", "</" * 9999, "<" * 99_999, "<style>" + "var(" * 9999, "<a href=x" * 9999]
)
def test_damaged_html_is_checked_as_far_as_possible(html: str) -> None:
    assert check(f"<svg>{html}", "Hello").findings[0].subject == "<svg>"
