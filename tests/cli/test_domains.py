"""`dispatcher domains`: the ceilings of recipient domains."""

from __future__ import annotations

import psycopg
import pytest

from tests.cli.commandline import CommandLine


@pytest.fixture
def storing(storing: CommandLine) -> CommandLine:
    """`dispatcher` in the test's process."""
    return storing.without_process


def test_ceilings_are_set_listed_and_removed_and_each_change_is_audited(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    assert "No recipient domain has a ceiling" in storing("domains", "list").stderr
    assert storing("domains", "list", "--json").json == {"domains": []}
    set_ = storing("domains", "set", "Example.org", "--per-second", "5", "--reason", "asked", "--actor", "ann")
    assert "example.org may get 5 emails per second." in set_.stderr
    both = storing("domains", "set", "example.org", "--concurrent", "2")
    assert "example.org may get 5 emails per second, 2 at the same time." in both.stderr
    listed = {"domain": "example.org", "per_second": 5.0, "concurrent": 2, "attempt_seconds": None, "waiting": 0}
    assert storing("domains", "list", "--json").json == {"domains": [listed]}
    assert "example.org" in storing("domains", "list").stdout

    removed = storing("domains", "remove", "example.org")
    assert (removed.code, removed.stderr.strip()) == (0, "The domain has no ceiling any more.")
    again = storing("domains", "remove", "example.org")
    assert again.code == 1
    assert "example.org has no ceiling" in again.stderr
    audited = connection.execute(
        "select actor, reason, detail from operator_audit where action = 'set_domain' order by audit_id"
    ).fetchall()
    assert audited[0] == ("ann", "asked", {"domain": "example.org", "per_second": 5, "concurrent": None})
    assert audited[2][2] == {"domain": "example.org", "removed": True}


def test_an_internationalized_domain_is_stored_in_the_form_of_dns(storing: CommandLine) -> None:
    assert storing("domains", "set", "@Bücher.example", "--concurrent", "1").code == 0
    assert storing("domains", "list", "--json").json["domains"][0]["domain"] == "xn--bcher-kva.example"
    assert storing("domains", "remove", "bücher.example").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("example.org",), "needs at least one of: --per-second, --concurrent"),
        (("example.org", "--per-second", "0"), "must be a"),
        (("example.org", "--per-second", "nan"), "must be a number"),
        (("example.org", "--per-second", "inf"), "must be a"),
        (("example.org", "--concurrent", "0"), "must be a"),
        (("example.org", "--concurrent", "1.5"), "must be a whole number"),
        (("ann@example.org", "--concurrent", "1"), "contains an @; write only the part after the @"),
        (("localhost", "--concurrent", "1"), "has no dot"),
        (("exa mple.org", "--concurrent", "1"), "Invalid value for 'DOMAIN'"),
        (("", "--concurrent", "1"), "Invalid value for 'DOMAIN'"),
    ],
)
def test_a_wrong_domain_or_value_is_refused(storing: CommandLine, arguments: tuple[str, ...], words: str) -> None:
    ended = storing("domains", "set", *arguments)

    assert ended.code == 2
    assert words in " ".join(ended.stderr.split())


def test_status_and_list_count_the_emails_that_wait(prepared: CommandLine, connection: psycopg.Connection) -> None:
    storing = prepared.without_process
    assert storing("domains", "set", "example.org", "--per-second", "5").code == 0
    assert storing("domains", "set", "idle.example", "--per-second", "5").code == 0
    one = ("--from", "a@example.com", "--to", "b@example.org", "--subject", "s", "--text", "t")
    assert storing("enqueue", "--key", "k", *one).code == 0
    connection.execute(
        "update email_log set status = 'waiting', wait_until = now() + interval '1 hour', publish_due_at = null,"
        " wait_reason = 'domain', wait_domain = 'example.org'"
    )
    connection.commit()

    waiting = {each["domain"]: each["waiting"] for each in storing("domains", "list", "--json").json["domains"]}
    assert waiting == {"example.org": 1, "idle.example": 0}
    expected = {"domain": "example.org", "per_second": 5.0, "concurrent": None, "attempt_seconds": None, "waiting": 1}
    assert storing("status", "--json").json["domains"] == [expected]
    assert "1 email waits: example.org may get 5 emails per second." in storing("status").stdout
    shown = storing("show", "k")
    assert "example.org may get 5 emails per second" in " ".join(shown.stdout.split())
