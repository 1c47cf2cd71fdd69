"""`dispatcher webhooks`: add, list, test, rotate, enable, replay and remove."""

from __future__ import annotations

import psycopg
import pytest

from tests.cli.commandline import CommandLine, in_process

URL = "https://shop.example.com/hooks"


@pytest.fixture
def storing(storing: CommandLine) -> CommandLine:
    """`dispatcher` in the test's process."""
    return storing.without_process


def test_a_webhook_is_added_listed_and_removed_and_its_secret_is_shown_once(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    assert "There is no webhook" in storing("webhooks", "list").stderr
    made = storing("webhooks", "add", URL, "--tenant", "shop", "--events", "email.bounced,failed", "--json").json
    number = str(made["id"])
    (webhook,) = storing("webhooks", "list", "--json").json["webhooks"]
    assert (webhook["url"], webhook["tenant_id"], webhook["events"]) == (URL, "shop", ["email.failed", "email.bounced"])
    assert (webhook["state"], webhook["recipients"]) == ("active", False)
    assert storing("webhooks", "show", number, "--json").json["url"] == URL
    assert made["secret"] not in storing("webhooks", "list").stdout
    rotated = storing("webhooks", "rotate", number, "--json").json
    assert rotated["secret"] != made["secret"]
    assert storing("webhooks", "replay", number, "--since", "2h").code == 0
    assert storing("webhooks", "enable", number, "--reason", "it works again").code == 0
    assert storing("webhooks", "remove", number).code == 0

    ended = storing("webhooks", "remove", number)
    assert (ended.code, ended.stderr.splitlines()[0]) == (1, f"dispatcher: There is no webhook {number}.")
    audited = connection.execute("select action, reason from operator_audit order by audit_id").fetchall()
    assert [action for action, _ in audited] == [
        *("webhook_add", "webhook_rotate", "webhook_replay", "webhook_enable", "webhook_remove")
    ]
    assert audited[3][1] == "it works again"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((URL,), "either --tenant or --all-tenants"),
        ((URL, "--tenant", "shop", "--all-tenants"), "either --tenant or --all-tenants"),
        ((URL, "--tenant", "a b"), "--tenant"),
        ((URL, "--tenant", "shop", "--events", "email.opened"), "email.sent"),
        (("http://127.0.0.1/hooks", "--all-tenants"), "DISPATCHER_WEBHOOKS_ALLOW_PRIVATE"),
        (("https://127.0.0.1/hooks", "--all-tenants"), "DISPATCHER_WEBHOOKS_ALLOW_PRIVATE=on allows other"),
        (("https://[fd00::1]:8443/hooks", "--all-tenants"), "DISPATCHER_WEBHOOKS_ALLOW_PRIVATE=on allows other"),
        (("https://ann:secret@example.com/", "--all-tenants"), "no user, password"),
    ],
)
def test_a_wrong_webhook_is_refused(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str) -> None:
    monkeypatch.setenv("DISPATCHER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")

    ended = in_process("webhooks", "add", *arguments)

    assert ended.code == 2
    assert words in ended.stderr
    assert "secret" not in ended.stderr


def test_a_wrong_time_of_a_replay_is_refused_with_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")

    ended = in_process("webhooks", "replay", "1", "--since", "yesterday")

    assert ended.code == 2
    assert "'--since': it must be an age such as 90s, 2h or 3d, or a time such as 2026-11-21T10:00Z" in ended.stderr
