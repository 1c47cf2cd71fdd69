"""`dispatcher topology grants` prints exactly the privileges that the statements need."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from dispatcher.store.grants import Role, roles_of
from dispatcher.store.queries import all_queries

OWNERS = {
    "create_schema",
    "create_migration_table",
    "record_migration",
    "replace_old_record",
    "revoke_producer",
    "grant_producer",
    "grant_dispatcher",
    "grant_reader",
}
"""Statements that only the owner executes: those of `init`, and the grants."""
PRODUCERS = {"enqueue", "enqueue_one", "enqueue_attachments", "find_by_key"}
_USES = {
    "insert": r"\binsert into dispatcher\.(\w+)",
    "update": r"\bupdate dispatcher\.(\w+)|\binsert into dispatcher\.(\w+)(?:(?!insert into).)*?\bdo update",
    "delete": r"\bdelete from dispatcher\.(\w+)",
    "select": r"(?<!delete )\b(?:from|join) dispatcher\.(\w+)\b(?! ?\()",
    "execute": r"dispatcher\.(\w+)\(",
}


def used_by(names: set[str]) -> dict[str, set[str]]:
    """The privileges that the statements need, by table or function."""
    used: dict[str, set[str]] = defaultdict(set)
    for name in names:
        text = all_queries()[name].decode()
        for right, pattern in _USES.items():
            for found in re.finditer(pattern, text, re.DOTALL):
                used[found[found.lastindex or 0]].add(right)
    for rights in used.values():
        if rights & {"update", "delete"}:
            rights.add("select")  # for the columns that `where` reads
    return dict(used)


def role_named(name: str, role: str) -> Role:
    """The grants of the kind `role`, for a role with the name `name`."""
    names = {"producer": "app", "dispatcher": "mail", "reader": "oncall", role: name}
    (found,) = [each for each in roles_of(**names, is_exact=False) if each.role == role]
    return found


def granted_to(role: str) -> dict[str, set[str]]:
    """The privileges of a role, by table or function, including privileges on single columns."""
    granted: dict[str, set[str]] = defaultdict(set)
    for grant in role_named("somebody", role).grants:
        rights = re.match(r"grant (.+?) on ", grant)
        assert rights is not None, grant
        for target in re.findall(r"dispatcher\.(\w+)", grant):
            granted[target] |= set(re.findall(r"\b(?:select|insert|update|delete|execute)\b", rights[1]))
    return dict(granted)


def test_the_dispatcher_role_has_exactly_the_rights_that_its_statements_need() -> None:
    assert granted_to("dispatcher") == used_by(set(all_queries()) - OWNERS)


def test_the_producer_role_has_exactly_the_rights_that_enqueueing_needs() -> None:
    used = used_by(PRODUCERS)
    for table in ("email_log", "email_idempotency"):
        used[table].add("select")  # `returning` reads some columns

    assert granted_to("producer") == used


@pytest.mark.parametrize("name", ["", "two\nlines", "nul\0", "x" * 64, "\N{SNOWMAN}" * 22])
def test_an_invalid_role_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid name for a role"):
        role_named(name, "reader")


def test_every_role_name_is_quoted() -> None:
    assert role_named('x"; drop  table {y}', "reader").grants[0] == (
        'grant usage on schema dispatcher to "x""; drop  table {y}"'
    )
