"""`dispatcher pause` and `dispatcher resume`."""

from __future__ import annotations

import psycopg
import pytest

from tests.cli.commandline import CommandLine, in_process


@pytest.fixture
def storing(storing: CommandLine) -> CommandLine:
    """`dispatcher` in the test's process."""
    return storing.without_process


def test_a_tenant_is_paused_listed_and_resumed(storing: CommandLine, connection: psycopg.Connection) -> None:
    assert storing("pause", "list").stderr.strip() == "Nothing is paused."
    begun = storing("pause", "tenant", "acme", "--for", "2h", "--reason", "complaints", "--actor", "ann")
    (pause,) = storing("pause", "list", "--json").json
    assert (pause["scope"], pause["name"], pause["reason"], pause["actor"]) == ("tenant", "acme", "complaints", "ann")
    assert pause["until"]
    assert "Paused tenant acme until 20" in begun.stderr
    assert "tenant acme" in storing("pause", "list").stdout
    resumed = storing("resume", "tenant", "acme")
    again = storing("resume", "tenant", "acme")

    assert (resumed.code, again.code) == (0, 1)
    assert "Resumed tenant acme." in resumed.stderr
    assert again.stderr.splitlines()[0] == 'dispatcher: No pause "tenant acme" is in force.'
    audited = connection.execute("select action, reason from operator_audit order by audit_id").fetchall()
    assert audited == [("pause", "complaints"), ("resume", "dispatcher resume")]


def test_a_provider_that_throttles_us_is_resumed_and_status_names_the_command(
    storing: CommandLine, prepared: CommandLine, connection: psycopg.Connection
) -> None:
    connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at)"
        " values ('ses', 'a:w0', 'paused', 'throttled', now() + interval '1 hour')"
    )
    assert "throttled. To try it at once: `dispatcher resume provider ses`." in prepared("status").stdout

    resumed = storing("resume", "provider", "ses")

    assert (resumed.code, "Resumed provider ses." in resumed.stderr) == (0, True)


def test_everything_is_paused_until_it_is_resumed(storing: CommandLine) -> None:
    begun = storing("pause", "all", "--reason", "database move")
    assert "Paused everything until `dispatcher resume all`." in begun.stderr
    assert storing("pause", "lane", "bulk", "--reason", "legal", "--json").json["until"] is None
    assert storing("resume", "all").code == 0

    assert [pause["name"] for pause in storing("pause", "list", "--json").json] == ["bulk"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pause", "tenant", "acme"), "--reason"),
        (("pause", "tenant", "--reason", "x"), "Give the name of the tenant."),
        (("pause", "all", "acme", "--reason", "x"), "`all` takes no name."),
        (("pause", "tenant", "a b", "--reason", "x"), "The tenant's name"),
        (("pause", "lane", "slow", "--reason", "x"), "There is no lane 'slow'. DISPATCHER_LANES has: urgent, normal"),
        (("pause", "provider", "pigeon", "--reason", "x"), "There is no provider 'pigeon'."),
        (("pause", "tenant", "acme", "--for", "400d", "--reason", "x"), "at most 366 days"),
        (("pause", "tenant", "acme", "--for", "0s", "--reason", "x"), "more than 0 s"),
        (("pause", "list", "acme"), "takes no name"),
        (("pause", "host", "a", "--reason", "x"), "'host' is not one of"),
        (("resume", "tenant"), "Give the name of the tenant."),
        (("resume", "tenant", ""), "Give the name of the tenant."),
        (("pause", "tenant", "", "--reason", "x"), "Give the name of the tenant."),
        (("pause", "all", "", "--reason", "x"), "`all` takes no name."),
        (("cancel", "--older-than", "99999999d", "--dry-run"), "is more than 36,500 days"),
    ],
)
def test_a_wrong_pause_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str) -> None:
    monkeypatch.setenv("DISPATCHER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")

    ended = in_process(*arguments)

    assert ended.code == 2
    assert words in " ".join(ended.stderr.split())
