"""`dispatcher suppressions`: what each command changes, prints and audits."""

from __future__ import annotations

from uuid import UUID

import orjson

from dispatcher.actions.suppressions import AddSuppressions
from tests.cli.commandline import CommandLine
from tests.store.books import Books, Row
from tests.store.suppressing import hasher_of, suppress

WHY = ("--reason", "closed account")


def entries(tables: Books) -> list[Row]:
    return tables.select("select * from suppression order by suppression_id")


def stopped(tables: Books, to: str, **fields: object) -> UUID:
    email_id = tables.enqueue_one(to=to, **fields)
    tables.change(email_id, status="failed", error_type="suppressed", publish_due_at=None, attempt_count=1)
    return email_id


def test_added_recipients_are_listed_masked_and_audited_without_addresses(storing: CommandLine, tables: Books) -> None:
    both = ("Ann <Ann@Example.org>", "example.net")
    done = storing("suppressions", "add", *both, *WHY, "--note", "for bob@example.com")
    again = storing("suppressions", "add", "ann@example.org", *WHY, "--json")
    listed = storing("suppressions", "list", "--json").json["suppressions"]
    found = storing("suppressions", "list", "ann@example.org", "--json").json["suppressions"]
    by_domain = storing("suppressions", "list", "bob@example.net")

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


def test_entries_of_all_tenants_are_listed_and_removed_by_id(storing: CommandLine, tables: Books) -> None:
    suppress(tables.connection, "ann@example.org", tenant_id="acme")
    suppress(tables.connection, "ann@example.org", "bob@example.org", tenant_id="shop")
    email_id = stopped(tables, "bob@example.org", tenant_id="shop")
    remove = ("suppressions", "remove", "--id", str(entries(tables)[2]["suppression_id"]), *WHY)

    pages, after = [], ["--limit", "1"]
    while after:
        document = storing("suppressions", "list", *after, "--json").json
        pages += [(each["tenant_id"], each["recipient"][0]) for each in document["suppressions"]]
        after = ["--limit", "1", "--after", document["next"]] if document["next"] else []
    of_kind = [
        len(storing("suppressions", "list", "--kind", kind, "--json").json["suppressions"])
        for kind in ("hard_bounce", "complaint")
    ]
    found = storing("suppressions", "list", "ann@example.org", "--json").json["suppressions"]
    empty = storing("suppressions", "list", "--tenant", "default")
    of_another = storing(*remove, "--json").json
    removed = storing(*remove, "--tenant", "shop", "--json").json
    both = storing(*remove, "ann@example.org")

    assert pages == [("shop", "b"), ("shop", "a"), ("acme", "a")]
    assert (of_kind, [each["tenant_id"] for each in found]) == ([3, 0], ["shop", "acme"])
    assert "Tenant 'default' suppresses no such recipient. Tenants with entries: acme, shop." in empty.stderr
    assert (of_another["removed"], removed["removed"]) == (0, 1)
    assert removed["stopped_email_ids"] == [str(email_id)]
    assert (both.code, len(entries(tables))) == (2, 2)


def test_a_removal_names_the_emails_that_the_entry_stopped(storing: CommandLine, tables: Books) -> None:
    suppress(tables.connection, "ann@example.org", "bob@example.org")
    email_id = stopped(tables, "Ann <ann@example.org>")
    stopped(tables, "bob@example.org")
    stopped(tables, "ann@example.org", tenant_id="other")
    arguments = ("suppressions", "remove", "ann@example.org", "--reason", "the mailbox works")

    tried = storing(*arguments, "--dry-run")
    assert storing(*arguments, "--dry-run", "--json").json["stopped_email_ids"] == [str(email_id)]
    assert len(entries(tables)) == 2
    done = storing(*arguments)
    again = storing(*arguments, "--json")

    assert f"1 email failed because the recipients were suppressed. For example:\n  {email_id}\n" in tried.stderr
    assert done.code == 0
    assert "Removed 1 suppressed recipient." in done.stderr
    assert "--replay" in done.stderr
    assert again.json == {"removed": 0, "stopped_count": 1, "stopped_email_ids": [str(email_id)]}
    assert [entry["masked"] for entry in entries(tables)] == ["b•••@example.org"]
    (audit,) = tables.select("select * from operator_audit where action = 'unsuppress'")
    assert (audit["reason"], audit["detail"]["was"]) == ("the mailbox works", "hard_bounce")


def test_stopped_emails_are_replayed_by_a_removal_or_like_others(storing: CommandLine, tables: Books) -> None:
    suppress(tables.connection, "ann@example.org")
    ann, bob = stopped(tables, "ann@example.org"), stopped(tables, "bob@example.org")

    undecided = storing("dlq", "list", "--json").json["emails"]
    groups = storing("dlq", "list", "--by", "error_type", "--error-type", "suppressed", "--json").json["groups"]
    without_rabbitmq = storing.having(DISPATCHER_AMQP_URL="amqp://u:p@127.0.0.1:1/")
    removed = without_rabbitmq("suppressions", "remove", "ann@example.org", *WHY, "--replay", "--yes")
    statuses = tables.status(ann), tables.status(bob)
    replayed = without_rabbitmq("dlq", "replay", "--error-type", "suppressed", "--yes", *WHY)

    assert (undecided, [(group["value"], group["emails"]) for group in groups]) == ([], [("suppressed", 2)])
    assert (removed.code, statuses) == (0, ("pending", "failed"))
    assert (replayed.code, tables.status(bob)) == (0, "pending")


def test_entries_of_a_topic_are_listed_and_removed_apart_from_those_for_all_emails(
    storing: CommandLine, tables: Books
) -> None:
    (storing.folder / "left.csv").write_text(
        "email,topic\nann@example.org,offers\nbob@example.org,\ncem@example.org,A\n"
    )
    storing("suppressions", "add", "ann@example.org", "--topic", "news", *WHY)
    storing("suppressions", "add", "ann@example.org", *WHY)
    imported = storing("suppressions", "import", "left.csv", "--topic", "news", "--json", *WHY).json
    email_id = stopped(tables, "ann@example.org", topic="news")
    stopped(tables, "ann@example.org", topic="tips")
    remove = ("suppressions", "remove", "ann@example.org", *WHY)

    def topics(*options: str) -> list[str | None]:
        return [each["topic"] for each in storing("suppressions", "list", *options, "--json").json["suppressions"]]

    listed = topics("--topic", "news"), topics("ann@example.org")
    misspelt = storing("suppressions", "add", "ann@example.org", "--topic", "My news", *WHY)
    whole = storing(*remove)
    of_topic = storing(*remove, "--topic", "news", "--json").json

    assert listed == (["news", "news"], ["offers", None, "news"])
    assert (imported["added"], imported["refused"][0]["line"]) == (2, 4)
    assert (misspelt.code, "must be the name of a topic" in misspelt.stderr) == (2, True)
    assert "Removed 1 suppressed recipient." in whole.stderr
    assert "a•••@example.org is still suppressed for emails with the topic offers." in whole.stderr
    assert (of_topic["removed"], of_topic["stopped_email_ids"]) == (1, [str(email_id)])
    assert sorted(filter(None, topics())) == ["news", "offers"]


def test_an_export_is_imported_again(storing: CommandLine, tables: Books) -> None:
    storing("suppressions", "add", "ann@example.org", "--kind", "complaint", "--note", "twice", *WHY)
    storing("suppressions", "add", "example.net", "--days", "3", *WHY)
    storing("suppressions", "add", "ann@example.org", "--topic", "newsletter", *WHY)
    before = entries(tables)
    (storing.folder / "suppressed.csv").write_text(storing("suppressions", "export").stdout)
    tables.connection.execute("delete from suppression")

    done = storing("suppressions", "import", "suppressed.csv", *WHY)

    assert (done.code, done.stderr) == (0, "Suppressed 3 recipients.\n")
    kept = ("address_hash", "is_domain", "masked", "reason", "note", "expires_at", "topic", "recipient_hash")
    after = sorted([row[name] for name in kept] for row in entries(tables))
    assert after == sorted([row[name] for name in kept] for row in before)


def test_an_import_adds_valid_lines_and_reports_others_without_their_text(storing: CommandLine, tables: Books) -> None:
    hostile = [
        "recipient,hash,expires_at",
        f'"{"a" * 200_000}",,',
        f"ann@example.org •,{'00' * 16},",
        "not an address,,",
    ]
    hostile += [f"\0•••@example.org,{'01' * 16},", "eve@example.org,,9999-12-31T23:59:59-23:59"]
    for name, text in {
        "lines": "ann@example.org\n\nBob@Example.org\nnot an address\nann@example.org\nexample.net\n",
        "table.csv": "email,kind,expires_at\ncem@example.org,complaint,2099-01-01\ndan@example.org,odd,\n",
        "hostile.csv": "\n".join(hostile),
    }.items():
        (storing.folder / name).write_text(text, encoding="utf-8")

    tried = storing("suppressions", "import", "lines", "--dry-run", *WHY)
    assert entries(tables) == []
    done = storing("suppressions", "import", "lines", "--kind", "hard_bounce", *WHY)
    table, others = [storing("suppressions", "import", name, "--json", *WHY) for name in ("table.csv", "hostile.csv")]

    assert (tried.code, done.code, table.code, others.code) == (3, 3, 3, 3)
    assert "line 4: " in done.stderr
    assert "not an address" not in done.stderr + others.stdout
    assert (table.json["valid"], table.json["added"], table.json["refused"][0]["line"]) == (1, 1, 3)
    assert (others.json["added"], [refusal["line"] for refusal in others.json["refused"]]) == (2, [2, 4, 6])
    bounced = dict.fromkeys(("a•••@example.org", "b•••@example.org", "example.net"), "hard_bounce")
    found = {entry["masked"]: entry["reason"] for entry in entries(tables) if entry["masked"] != "•••"}
    assert found == bounced | {"c•••@example.org": "complaint"}
    ann = hasher_of(tables.connection).hash("ann@example.org")
    assert ann in {bytes(entry["address_hash"]) for entry in entries(tables)}
    assert storing("suppressions", "list").code == 0
