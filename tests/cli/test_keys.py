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
    assert storing("keys", "list", "--json").json == []
    assert "Every key is revoked, so `dispatcher api` refuses every request" in storing("keys", "list").stderr


def test_a_key_with_the_scope_send_needs_valid_senders() -> None:
    for arguments, word in (
        ((), "--from-domain or --from-address"),
        (("--from-anywhere", "--from-domain", "example.com"), "--from-anywhere"),
        (("--from-domain", "exa mple.com"), "--from-domain"),
        (("--from-address", "nobody"), "--from-address"),
        (("--from-anywhere", "--tenant", "a b"), "--tenant"),
    ):
        ended = in_process("keys", "create", "--name", "shop", *arguments)
        assert ended.code == 2
        assert word in ended.stderr
