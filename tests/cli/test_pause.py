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
    (pause,) = storing("pause", "list", "--json").json["pauses"]
    assert (pause["scope"], pause["name"], pause["reason"], pause["actor"]) == ("tenant", "acme", "complaints", "ann")
    assert pause["until"]
    assert "Tenant acme is paused until 20" in begun.stderr
    assert "complaints" in storing("pause", "list").stdout
    resumed = storing("resume", "tenant", "acme")
    again = storing("resume", "tenant", "acme")

    assert (resumed.code, again.code) == (0, 1)
    assert "Resumed." in resumed.stderr
    assert again.stderr.splitlines()[0] == "dispatcher: The tenant acme is not paused."
    audited = connection.execute("select action, reason from operator_audit order by audit_id").fetchall()
    assert audited == [("pause", "complaints"), ("resume", "dispatcher resume tenant")]


def test_a_provider_that_throttles_us_is_resumed_and_status_names_the_command(
    storing: CommandLine, prepared: CommandLine, connection: psycopg.Connection
) -> None:
    connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at)"
        " values ('ses', 'a:w0', 'paused', 'throttled', now() + interval '1 hour')"
    )
    assert "throttled. To try it at once: `dispatcher resume provider ses`." in prepared("status").stdout

    resumed = storing("resume", "provider", "ses")

    assert (resumed.code, "Resumed." in resumed.stderr) == (0, True)


def test_everything_is_paused_until_it_is_resumed(storing: CommandLine) -> None:
    begun = storing("pause", "all", "--reason", "database move")
    assert "Everything is paused by " in begun.stderr
    assert storing("pause", "lane", "bulk", "--reason", "legal", "--json").json["until"] is None
    assert storing("resume", "all").code == 0

    assert [pause["name"] for pause in storing("pause", "list", "--json").json["pauses"]] == ["bulk"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pause", "tenant", "acme"), "--reason"),
        (("pause", "tenant", "--reason", "x"), "it is required."),
        (("pause", "all", "acme", "--reason", "x"), "unexpected extra argument"),
        (("pause", "tenant", "a b", "--reason", "x"), "Invalid value for 'TENANT': it must begin with an ASCII letter"),
        (("pause", "lane", "slow", "--reason", "x"), "it must be one of DISPATCHER_LANES: urgent, normal"),
        (("pause", "provider", "pigeon", "--reason", "x"), "it must be one of DISPATCHER_PROVIDERS: smtp"),
        (("pause", "tenant", "acme", "--for", "400d", "--reason", "x"), "from 1 second to 366 days"),
        (("pause", "tenant", "acme", "--for", "0s", "--reason", "x"), "from 1 second to 366 days"),
        (("pause", "list", "acme"), "unexpected extra argument"),
        (("pause", "host", "a", "--reason", "x"), "No such command 'host'"),
        (("resume", "tenant"), "it is required."),
        (("resume", "tenant", ""), "it must be 1 to 100 characters long"),
        (("pause", "tenant", "", "--reason", "x"), "it must be 1 to 100 characters long"),
    ],
)
def test_a_wrong_pause_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str) -> None:
    monkeypatch.setenv("DISPATCHER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setenv("DISPATCHER_PROVIDERS", "smtp")

    ended = in_process(*arguments)

    assert ended.code == 2
    assert words in " ".join(ended.stderr.split())
