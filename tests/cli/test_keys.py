"""`dispatcher keys`: create, list and revoke."""

from __future__ import annotations

import psycopg
import pytest

from dispatcher.domain.api_key import Secret
from dispatcher.store.api_keys import list_keys
from tests.cli.commandline import CommandLine, in_process


@pytest.fixture
def storing(storing: CommandLine) -> CommandLine:
    """`dispatcher` in the test's process."""
    return storing.without_process


def test_a_key_is_shown_once_stored_as_a_hash_and_revoked_by_its_id(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    assert "loopback interface" in storing("keys", "list").stderr
    made = storing("keys", "create", "--name", "shop", "--from-domain", "Bücher.example", "--json").json
    secret = Secret.parse(made["key"])
    assert secret is not None
    (key,) = list_keys.sync(connection)
    assert secret.matches(key.secret_hash)
    assert (key.scopes, key.sender_domains) == (frozenset({"send", "read"}), frozenset({"xn--bcher-kva.example"}))

    listed = storing("keys", "list")
    assert made["key_id"] in listed.stdout
    assert secret.secret not in listed.stdout

    assert storing("keys", "revoke", made["key_id"]).code == 0
    assert storing("keys", "revoke", made["key_id"]).code == 1
    assert storing("keys", "list", "--json").json == {"keys": []}
    (revoked,) = storing("keys", "list", "--all", "--json").json["keys"]
    assert (revoked["from_domains"], revoked["scopes"]) == (["xn--bcher-kva.example"], ["read", "send"])
    assert storing("keys", "show", made["key_id"], "--json").json == revoked
    audited = connection.execute("select action, reason from operator_audit order by audit_id").fetchall()
    assert audited == [("create_key", "dispatcher keys create"), ("revoke_key", "dispatcher keys revoke")]


def test_options_of_a_key_repeat_and_its_lanes_must_exist(storing: CommandLine) -> None:
    made = ("keys", "create", "--name", "shop", "--all-tenants")
    given = (
        "--scope",
        "operate",
        "--scope",
        "read",
        "--allow-lane",
        "bulk",
        "--allow-lane",
        "normal",
        "--lane",
        "bulk",
    )
    assert storing(*made, *given).code == 0
    (key,) = storing("keys", "list", "--json").json["keys"]
    assert (key["scopes"], key["allowed_lanes"], key["lane"]) == (["operate", "read"], ["bulk", "normal"], "bulk")
    assert (key["tenant_id"], key["from_domains"]) == (None, [])
    refused = storing(*made, "--scope", "read", "--allow-lane", "nosuch", "--tenant", "shop")
    assert refused.code == 2
    assert "'--allow-lane': it must be one of DISPATCHER_LANES: urgent, normal, bulk" in refused.stderr
    assert "'--all-tenants': it cannot be combined with --tenant" in refused.stderr


def test_a_key_with_the_scope_send_needs_valid_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    for arguments, word in (
        ((), "needs --from-domain, --from-address or --from-anywhere"),
        (("--from-anywhere", "--from-domain", "example.com"), "--from-anywhere"),
        (("--from-domain", "exa mple.com"), "--from-domain"),
        (("--from-address", "nobody"), "--from-address"),
        (("--from-anywhere", "--tenant", "a b"), "--tenant"),
    ):
        ended = in_process("keys", "create", "--name", "shop", *arguments)
        assert ended.code == 2
        assert word in ended.stderr
