"""`dispatcher find`, `show`, `cancel`, `reschedule`, `held` and `forget`: selection, output and exit codes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from dispatcher import enqueue_many
from tests.cli.commandline import CommandLine
from tests.store.books import Books, email
from tests.store.damaged_rows import insert_damaged

ADDRESS = "ann@example.org"
WHY = ("--reason", "seen at the provider")


def made(tables: Books, count: int, **columns: object) -> list[str]:
    email_ids = tables.enqueue(count)
    for email_id in email_ids:
        tables.change(email_id, **columns)
    return [str(email_id) for email_id in email_ids]


def held(tables: Books, count: int) -> list[str]:
    return made(tables, count, status="held", publish_due_at=None, attempt_count=1, provider="ses")


def test_an_email_is_found_by_its_recipient_and_shown_with_its_timeline(storing: CommandLine, tables: Books) -> None:
    email_id = tables.enqueue_one(to="Ann <Ann@Example.org>", tags=["receipt"])
    tables.enqueue_one(to="bob@example.net")

    found = storing("find", "--to", "ann@example.org")
    document = storing("find", "--to", "ANN@example.org", "--tag", "receipt", "--since", "1h", "--json").json
    shown = storing("show", str(email_id), "--no-queue")
    of_dlq = storing("dlq", "show", str(email_id), "--no-queue")
    nobody = storing("find", "--to", "nobody@example.org")
    event = "insert into email_event (email_id, event_key, provider, kind, happened_at)"
    event += " values (%s, '', 'ses', 'opened', now())"
    tables.connection.execute(event.encode(), [email_id])
    tables.change(email_id, last_error="\x1b]0;x")
    _, csv_line = storing("find", "--to", "ann@example.org", "--csv").stdout.splitlines()

    assert (found.code, found.stderr) == (0, "1 email.\n")
    assert str(email_id) in found.stdout
    assert "a•••@example.org" in found.stdout
    assert csv_line.startswith(f'"{email_id}","default",')
    assert '"kind: opened; at: 20' in csv_line
    assert csv_line.isprintable()
    (email,) = document["emails"]
    assert (email["id"], email["recipients"]) == (str(email_id), ["a•••@example.org"])
    assert (document["next"], document["was_cut"], document["recipients_since"]) == (None, False, None)
    assert "timeline" in shown.stdout
    assert "enqueued" in shown.stdout
    assert of_dlq.stdout.split("\n")[0] == shown.stdout.split("\n")[0]
    for ended in (found, shown):
        assert "ann@" not in ended.stdout.lower() + ended.stderr.lower()
    assert (nobody.code, nobody.stdout, nobody.stderr) == (1, "", "No email matches.\n")


def test_a_key_is_shown_whatever_its_tenant_and_tenants_with_the_same_key_are_listed(
    storing: CommandLine, tables: Books
) -> None:
    keys = (("only-1", "shop"), ("both-1", "acme"), ("both-1", "shop"))
    made = enqueue_many(tables.connection, [email(key, tenant_id=tenant) for key, tenant in keys])
    only, of_acme, of_shop = (each.email_id for each in made)

    shown = storing("show", "only-1", "--no-queue", "--json")
    several = storing("show", "both-1", "--no-queue")
    of_one = storing("show", "both-1", "--no-queue", "--tenant", "shop", "--json")
    of_id = storing("show", str(of_acme), "--no-queue", "--json")
    none = storing("show", "none-1", "--no-queue")
    foreign = storing("show", "only-1", "--no-queue", "--tenant", "acme")

    assert [each.json["id"] for each in (shown, of_one, of_id)] == [str(each) for each in (only, of_shop, of_acme)]
    assert (several.code, several.stdout) == (1, "")
    assert f"acme ({of_acme}), shop ({of_shop})" in several.stderr
    assert "--tenant" in several.stderr
    assert (none.code, foreign.code) == (1, 1)
    assert "No tenant has an email with the message key 'none-1'." in none.stderr
    assert "Tenant 'acme' has no email with the message key 'only-1'." in foreign.stderr


def test_tags_channels_and_domains_select_emails(storing: CommandLine, tables: Books) -> None:
    for to in (["ann@example.org", "Bob <bob@EXAMPLE.org>"], ["ann@example.org", "c@example.net"]):
        tables.enqueue_one(to=to, tags=["receipt"])
    tables.connection.execute("update email_log set status = 'failed', error_type = 'refused', publish_due_at = null")
    an_email, an_sms = held(tables, 2)
    tables.change(UUID(an_sms), channel="sms", last_error="No answer.")
    tagged, sms, other = tables.enqueue_one(tags=["reminder"]), tables.enqueue_one(), tables.enqueue_one()
    tables.change(sms, channel="sms")

    groups = storing("dlq", "list", "--by", "domain", "--status", "failed", "--json").json["groups"]
    by_text = storing("held", "list", "--text", "no ANSWER", "--provider", "ses", "--json").json["emails"]
    by_tag = [len(storing("dlq", "list", "--tag", tag, "--json").json["emails"]) for tag in ("receipt", "other")]
    by_channel = [
        [each["email_id"] for each in storing(name, "list", *status, "--channel", to, "--json").json["emails"]]
        for name, status in (("held", ()), ("dlq", ("--status", "held")))
        for to in ("email", "sms", "fax")
    ]
    assert storing("cancel", "--tag", "reminder", *WHY, "--yes").code == 0
    assert storing("cancel", "--channel", "sms", *WHY, "--yes").code == 0

    assert [(group["value"], group["emails"]) for group in groups] == [("example.org", 2), ("example.net", 1)]
    assert ([each["email_id"] for each in by_text], by_tag) == ([an_sms], [2, 0])
    assert by_channel == [[an_email], [an_sms], []] * 2
    assert [tables.status(each) for each in (tagged, sms, other)] == ["cancelled", "cancelled", "pending"]


def test_commands_show_damaged_rows_beside_others_in_every_zone(storing: CommandLine, tables: Books) -> None:
    ids = insert_damaged(tables)
    other = tables.enqueue_one()

    for zone, instant in (("America/New_York", ": -infinity"), ("Asia/Tokyo", ": infinity")):
        command = storing.having(TZ=zone)
        found = command("find", "--limit", "1000")
        shown = {name: command("show", str(ids[name]), "--no-queue") for name in ids if instant in name}
        others = {words: command(*words.split()) for words in ("find --json --limit 1000", "dlq list", "held list")}

        assert all(str(email_id) in found.stdout for email_id in (other, *ids.values()))
        assert {name: each.stderr for name, each in shown.items() if each.code != 0} == {}
        assert {words: each.stderr for words, each in others.items() if each.code != 0} == {}


def test_emails_are_cancelled_by_key_or_id_and_the_exit_code_says_if_any(storing: CommandLine, tables: Books) -> None:
    (sending,) = made(tables, 1, status="sending", publish_due_at=None)
    first, second = tables.enqueue(2, tenant_id="shop")
    key, unknown = tables.key(first), str(uuid4())

    none = storing("cancel", sending, unknown, *WHY)
    foreign = storing("cancel", key, *WHY)
    done = storing("cancel", key, "--tenant", "shop", *WHY)
    some = storing("cancel", sending, str(first), str(second), *WHY, "--json")

    assert [each.code for each in (none, foreign, done, some)] == [1, 1, 0, 3]
    assert f"{sending}: too late: not changed, because the status is sending." in none.stderr
    assert f"{unknown}: not found in this database." in none.stderr
    assert done.stderr == f"{first}: cancelled.\n"
    assert some.json["results"] == {"too_late": 1, "already_cancelled": 1, "cancelled": 1}
    assert some.json["unchanged"] == {sending: {"result": "too_late", "status": "sending"}}
    assert tables.statuses() == {"sending": 1, "cancelled": 2}


def test_a_filter_shows_what_it_selects_and_asks(storing: CommandLine, tables: Books) -> None:
    bulk = made(tables, 25, lane="bulk")
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    (late,) = made(tables, 1, lane="bulk", status="waiting", publish_due_at=None, wait_until=tomorrow)
    made(tables, 1, lane="urgent")

    dry = storing("cancel", "--lane", "bulk", "--dry-run", "--json")
    unasked = storing("cancel", "--lane", "bulk", *WHY)
    unchanged = tables.statuses()
    done = storing("cancel", "--lane", "bulk", *WHY, "--yes")
    none_left = storing("cancel", "--lane", "bulk", *WHY, "--yes")

    selected = {"selected": {"pending": 25, "waiting": 1}, "samples": {"pending": bulk[:5], "waiting": [late]}}
    assert (dry.code, dry.json) == (0, {**selected, "others": 0, "has_more": False, "results": {}, "unchanged": {}})
    assert unasked.code == 2
    assert f"25 emails: pending. For example:\n  {bulk[0]}\n  " in unasked.stderr
    assert f"1 email: waiting. For example:\n  {late}\n" in unasked.stderr
    assert unchanged == {"pending": 26, "waiting": 1}
    assert (done.code, "26 emails: cancelled." in done.stderr) == (0, True)  # more than 20 are counted, not listed
    assert (none_left.code, none_left.stderr) == (0, "No pending or waiting email matches.\n")
    assert tables.statuses() == {"cancelled": 26, "pending": 1}


def test_rescheduled_emails_wait_until_the_time_in_its_zone(storing: CommandLine, tables: Books) -> None:
    first, second = tables.enqueue(2)
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=2)

    by_time = storing("reschedule", str(first), "--send-at", at.isoformat(), *WHY)
    shown = storing("dlq", "show", str(first), "--no-queue").stdout
    by_age = storing("reschedule", str(second), "--send-in", "2h", *WHY)
    now = storing("reschedule", "--status", "waiting", "--newer-than", "1h", "--now", *WHY, "--yes", "--json")

    assert (by_time.code, by_time.stderr, by_age.code) == (0, f"{first}: rescheduled.\n", 0)
    planned: dict[UUID, datetime] = {}
    for act in tables.select("select email_id, detail from operator_audit order by acted_at"):
        planned.setdefault(act["email_id"], datetime.fromisoformat(act["detail"]["send_at"]))
    assert planned[first] == at
    assert timedelta(hours=1.9) < planned[second] - datetime.now(UTC) < timedelta(hours=2)
    assert (now.code, now.json["results"], now.json["unchanged"]) == (0, {"rescheduled": 2}, {})
    assert all(row["wait_until"] < datetime.now(UTC) + timedelta(minutes=1) for row in tables.rows())
    (line,) = [line for line in shown.splitlines() if line.startswith("waits")]
    until = at.astimezone().isoformat(sep=" ", timespec="milliseconds")
    assert line.split(maxsplit=1)[1] == f"until {until} because it is scheduled"
    assert "reschedule" in shown.partition("operator actions")[2]


def test_an_argument_that_is_not_utf_8_is_refused(storing: CommandLine) -> None:
    for arguments in (("cancel", "\udcff", *WHY), ("cancel", "--correlation-id", "\udcff", "--dry-run")):
        ended = storing(*arguments)

        assert (ended.code, "is not valid UTF-8" in ended.stderr) == (2, True)


def test_a_second_decision_about_a_held_email_changes_nothing_and_says_so(storing: CommandLine, tables: Books) -> None:
    email_id, expired, alive = held(tables, 3)
    tables.change(UUID(expired), expires_at=datetime.now(UTC) - timedelta(minutes=1))

    done = storing("held", "confirm", email_id, *WHY)
    again = storing("held", "confirm", email_id, *WHY)
    too_late = storing("held", "release", email_id, *WHY, "--json")
    none = storing("held", "release", expired, *WHY)
    some = storing("held", "release", alive, str(uuid4()), *WHY, "--actor", "ann")

    assert (done.code, done.stderr) == (0, f"{email_id}: confirmed; the status is now sent.\n")
    assert (again.code, again.stderr) == (0, f"{email_id}: not changed: already sent.\n")
    assert (too_late.code, too_late.json["results"]) == (0, {"already_sent": 1})
    assert (none.code, some.code) == (1, 3)
    assert none.stderr == f"{expired}: not changed: the email has expired, and is never sent again.\n"
    assert tables.statuses() == {"sent": 1, "held": 1, "pending": 1}
    acts = tables.connection.execute("select actor from operator_audit order by audit_id").fetchall()
    assert ("@" in acts[0][0], acts[1]) == (True, ("ann",))


def test_an_address_is_forgotten_and_the_exit_code_is_3_if_emails_are_left(storing: CommandLine, tables: Books) -> None:
    sent, pending = tables.enqueue(2, to=ADDRESS)
    tables.change(sent, status="sent", publish_due_at=None)

    planned = storing("forget", ADDRESS, *WHY, "--dry-run", "--json")
    refused = storing("forget", ADDRESS, *WHY)
    done = storing("forget", f"Ann <{ADDRESS}>", *WHY, "--yes", "--actor", "bob")
    tables.change(pending, status="sent", publish_due_at=None)
    rest = storing("forget", ADDRESS, *WHY, "--yes", "--json")
    again = storing("forget", ADDRESS, *WHY, "--yes")

    counts = {"emails": 1, "contents": 1, "attachments": 0, "events": 0, "suppressions": 0}
    expected = {"dry_run": True, **counts, "unfinished": [str(pending)], "locked": [], "read": 2}
    assert (planned.code, planned.json) == (3, expected)
    assert (refused.code, "Add --yes" in refused.stderr) == (2, True)
    assert done.code == 3
    remedy = "Cancel such emails, or run the command again when they are finished."
    assert done.stderr.splitlines() == [
        "Erased the address from 1 email: 1 content, 0 attachments, 0 events.",
        f"Not changed: 1 email (pending, waiting or sending): {pending}. {remedy}",
    ]
    assert (rest.code, rest.json["emails"], rest.json["unfinished"]) == (0, 1, [])
    assert (again.code, again.stderr) == (0, "Erased the address from 0 emails: 0 contents, 0 attachments, 0 events.\n")
    assert ADDRESS not in done.stderr + done.stdout
    audited = tables.connection.execute("select actor, action, reason from operator_audit order by audit_id").fetchall()
    assert (audited[0], len(audited)) == (("bob", "forget", WHY[1]), 2)
