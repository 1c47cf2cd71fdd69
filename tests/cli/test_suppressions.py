"""`dispatcher suppressions`: what each command changes, prints and audits."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import orjson
import psycopg
import pytest

from dispatcher.actions.suppressions import AddSuppressions
from tests.cli.commandline import CommandLine
from tests.store.books import Books, Row
from tests.store.suppressing import hasher_of, suppress

WHY = ("--reason", "closed account")


@pytest.fixture
def prepared(prepared: CommandLine) -> CommandLine:
    return prepared.without_process


@pytest.fixture
def tables(connection: psycopg.Connection) -> Books:
    return Books(connection)


def entries(tables: Books) -> list[Row]:
    return tables.select("select * from suppression order by suppression_id")


def stopped(tables: Books, to: str, **fields: object) -> UUID:
    """An email that failed because its recipient is suppressed."""
    email_id = tables.enqueue_one(to=to, **fields)
    tables.change(email_id, status="failed", error_type="suppressed", publish_due_at=None, attempt_count=1)
    return email_id


def test_added_recipients_are_listed_masked_and_audited_without_addresses(prepared: CommandLine, tables: Books) -> None:
    done = prepared(
        "suppressions", "add", "Ann <Ann@Example.org>", "example.net", *WHY, "--note", "for bob@example.com"
    )
    again = prepared("suppressions", "add", "ann@example.org", *WHY, "--json")
    listed = prepared("suppressions", "list", "--json").json["suppressions"]
    found = prepared("suppressions", "list", "ann@example.org", "--json").json["suppressions"]
    by_domain = prepared("suppressions", "list", "bob@example.net")

    assert (done.code, done.stderr) == (0, f"Suppressed 2 recipients.\n{AddSuppressions.done}\n")
    assert again.json == {"added": 0, "unchanged": 1}
    assert sorted((entry["recipient"], entry["kind"], entry["note"]) for entry in listed) == [
        ("a•••@example.org", "manual", "for <address>"),
        ("example.net", "manual", "for <address>"),
    ]
    assert [entry["recipient"] for entry in found] == ["a•••@example.org"]
    assert "example.net" in by_domain.stdout
    (audit,) = tables.select("select * from operator_audit where action = 'suppress'")
    assert (audit["reason"], audit["detail"]["tenant"], audit["detail"]["entries"]) == ("closed account", "default", 2)
    assert "example" not in orjson.dumps(audit["detail"]).decode()


def test_pages_and_kinds(prepared: CommandLine, tables: Books) -> None:
    for name in ("ann", "bob", "cem"):
        suppress(tables.connection, f"{name}@example.org")
    prepared("suppressions", "add", "dan@example.org", "--kind", "complaint", "--days", "30", *WHY)

    page = prepared("suppressions", "list", "--limit", "2", "--json").json
    rest = prepared("suppressions", "list", "--after", page["next"], "--json").json
    complaints = prepared("suppressions", "list", "--kind", "complaint", "--json").json["suppressions"]
    both = ("--days", "3", "--expires-at", "2036-01-01T00:00:00Z")
    refused = [prepared("suppressions", "add", "dan@example.org", *both, *WHY, *dry) for dry in ((), ("--dry-run",))]

    assert [entry["recipient"][0] for entry in page["suppressions"] + rest["suppressions"]] == ["d", "c", "b", "a"]
    assert [entry["recipient"][0] for entry in complaints] == ["d"]
    assert complaints[0]["expires_at"] is not None
    assert [each.code for each in refused] == [2, 2]


def test_a_removal_names_the_emails_that_the_entry_stopped_and_a_dry_run_changes_nothing(
    prepared: CommandLine, tables: Books
) -> None:
    suppress(tables.connection, "ann@example.org", "bob@example.org")
    email_id = stopped(tables, "Ann <ann@example.org>")
    stopped(tables, "bob@example.org")
    stopped(tables, "ann@example.org", tenant_id="other")
    arguments = ("suppressions", "remove", "ann@example.org", "--reason", "the mailbox works")

    tried = prepared(*arguments, "--dry-run")
    assert len(entries(tables)) == 2
    done = prepared(*arguments)
    again = prepared(*arguments, "--json")

    assert f"1 email failed because the recipients were suppressed, such as {email_id}." in tried.stderr
    assert done.code == 0
    assert "Removed 1 suppressed recipient." in done.stderr
    assert "--replay" in done.stderr
    assert again.json == {"removed": 0, "stopped_count": 1, "stopped_email_ids": [str(email_id)]}
    assert [entry["masked"] for entry in entries(tables)] == ["b•••@example.org"]
    (audit,) = tables.select("select * from operator_audit where action = 'unsuppress'")
    assert (audit["reason"], audit["detail"]["was"]) == ("the mailbox works", "hard_bounce")


def test_a_removal_with_replay_makes_only_the_stopped_emails_pending(prepared: CommandLine, tables: Books) -> None:
    suppress(tables.connection, "ann@example.org")
    ann, bob = stopped(tables, "ann@example.org"), stopped(tables, "bob@example.org")

    done = prepared("suppressions", "remove", "ann@example.org", *WHY, "--replay", "--yes")

    assert (done.code, tables.status(ann), tables.status(bob)) == (0, "pending", "failed")


def test_suppressed_emails_are_listed_and_replayed_like_other_failed_emails(
    prepared: CommandLine, tables: Books
) -> None:
    email_id = stopped(tables, "ann@example.org")

    groups = prepared("dlq", "list", "--by", "error_type", "--json").json["groups"]
    tried = prepared("dlq", "replay", "--error-type", "suppressed", "--dry-run", "--json").json
    done = prepared("dlq", "replay", "--error-type", "suppressed", "--yes", *WHY)

    assert [(group["value"], group["emails"]) for group in groups] == [("suppressed", 1)]
    assert tried["emails"] == {"replayed": 1}
    assert (done.code, tables.status(email_id)) == (0, "pending")


def test_an_export_is_imported_again(prepared: CommandLine, tables: Books, tmp_path: Path) -> None:
    prepared("suppressions", "add", "ann@example.org", "--kind", "complaint", "--note", "twice", *WHY)
    prepared("suppressions", "add", "example.net", "--days", "3", *WHY)
    before = entries(tables)
    exported = tmp_path / "suppressed.csv"
    exported.write_text(prepared("suppressions", "export").stdout)
    tables.connection.execute("delete from suppression")

    done = prepared("suppressions", "import", str(exported), *WHY)

    assert (done.code, done.stderr) == (0, "Suppressed 2 recipients.\n")
    kept = ("address_hash", "is_domain", "masked", "reason", "note", "expires_at")
    assert sorted([row[name] for name in kept] for row in entries(tables)) == sorted(
        [row[name] for name in kept] for row in before
    )


def test_no_line_of_an_import_stops_the_others_or_stores_an_address(
    prepared: CommandLine, tables: Books, tmp_path: Path
) -> None:
    table = tmp_path / "entries.csv"
    lines = ["recipient,hash,expires_at", f'"{"a" * 200_000}",,', f"ann@example.org •,{'00' * 16},"]
    lines += ["bob@example.org,,", f"\0•••@example.org,{'01' * 16},", "eve@example.org,,9999-12-31T23:59:59-23:59"]
    table.write_text("\n".join(lines), encoding="utf-8")

    done = prepared("suppressions", "import", str(table), "--json", *WHY)

    assert (done.code, done.json["added"]) == (3, 3)
    assert [refusal["line"] for refusal in done.json["refused"]] == [2, 6]
    assert sorted(entry["masked"] for entry in entries(tables)) == ["b•••@example.org", "•••", "•••"]
    assert prepared("suppressions", "list").code == 0


def test_an_import_adds_valid_lines_and_reports_the_others_without_their_text(
    prepared: CommandLine, tables: Books, tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("ann@example.org\n\nBob@Example.org\nnot an address\nann@example.org\nexample.net\n")
    table = tmp_path / "table.csv"
    table.write_text("email,kind,expires_at\ncem@example.org,complaint,2099-01-01\ndan@example.org,odd,\n")

    tried = prepared("suppressions", "import", str(lines), "--dry-run", *WHY)
    assert entries(tables) == []
    done = prepared("suppressions", "import", str(lines), "--kind", "hard_bounce", *WHY)
    other = prepared("suppressions", "import", str(table), "--json", *WHY)

    assert (tried.code, done.code, other.code) == (3, 3, 3)
    assert "line 4: " in done.stderr
    assert "not an address" not in done.stderr
    assert (other.json["valid"], other.json["added"], other.json["refused"][0]["line"]) == (1, 1, 3)
    assert {entry["masked"]: entry["reason"] for entry in entries(tables)} == {
        "a•••@example.org": "hard_bounce",
        "b•••@example.org": "hard_bounce",
        "example.net": "hard_bounce",
        "c•••@example.org": "complaint",
    }
    ann = hasher_of(tables.connection).hash("ann@example.org")
    assert ann in {bytes(entry["address_hash"]) for entry in entries(tables)}
