"""What operators set for all hosts: lanes, tenants, domains, pauses, API keys and webhooks. `test_main.py` has the
refusals, and `tests/test_actions.py` compares the commands with the other faces."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher import Email, enqueue
from dispatcher.domain.api_key import Secret
from dispatcher.store.api_keys import list_keys
from tests.cli.commandline import CommandLine
from tests.store.books import Books


def stored(tables: Books, sender: str, lane: str | None = None, **more: Any) -> tuple[object, ...]:
    key = f"{sender} {lane} {more}"
    email = Email(message_key=key, sender=sender, to=["a@example.org"], subject="s", text="t", lane=lane, **more)
    row = tables.row(enqueue(tables.connection, email).email_id)
    return tuple(row[name] for name in ("lane", "on_uncertain", "max_attempts", "redeliver_seconds"))


def audited(tables: Books) -> list[tuple[Any, ...]]:
    return tables.connection.execute("select action, reason from operator_audit order by audit_id").fetchall()


def test_a_sender_s_rule_decides_the_lane_by_address_then_by_domain(storing: CommandLine, tables: Books) -> None:
    assert storing("lanes", "set", "--from", "Otp@Example.com", "urgent").code == 0
    assert storing("lanes", "set", "--from", "@example.com", "bulk", "--weight", "5").code == 0

    assert stored(tables, "Login <OTP@EXAMPLE.COM>")[0] == "urgent"
    assert stored(tables, "news@example.com")[0] == "bulk"
    assert stored(tables, "news@mail.example.com")[0] == "normal"
    assert stored(tables, "otp@example.com", "bulk")[0] == "bulk"
    listed = {each["lane"]: each["senders"] for each in storing("lanes", "list", "--json").json["lanes"]}
    assert listed == {"urgent": ["otp@example.com"], "normal": [], "bulk": ["@example.com"]}

    assert storing("lanes", "unset", "--from", "otp@example.com").code == 0
    assert stored(tables, "otp@example.com")[0] == "bulk"
    acts = tables.select("select action, detail from operator_audit order by audit_id")
    assert [act["action"] for act in acts] == ["set_lane"] * 4
    assert "otp@" not in str(acts)
    bulk = [
        (act["detail"]["lane"], act["detail"].get("weight"), act["detail"].get("sender_domain")) for act in acts[1:3]
    ]
    assert bulk == [("bulk", 5.0, None), ("bulk", None, "example.com")]


def test_a_lane_s_policy_applies_unless_the_email_has_its_own(storing: CommandLine, tables: Books) -> None:
    policy = ("--on-uncertain", "resend", "--max-attempts", "2", "--redeliver-for", "4h")
    assert storing("lanes", "set", "urgent", *policy).code == 0
    assert storing("lanes", "set", "urgent", "--weight", "80").code == 0

    assert stored(tables, "a@example.com", "urgent") == ("urgent", "resend", 2, 14400.0)
    assert stored(tables, "a@example.com", "urgent", on_uncertain="hold") == ("urgent", "hold", 2, 14400.0)
    assert stored(tables, "a@example.com") == ("normal", None, None, None)
    (urgent, normal, bulk) = storing("lanes", "list", "--json").json["lanes"]
    assert (urgent["weight"], urgent["on_uncertain"], urgent["max_attempts"]) == (80.0, "resend", 2)
    assert (normal["weight"], bulk["weight"], urgent["share"]) == (40.0, 10.0, pytest.approx(80 / 130))

    assert [storing("lanes", "unset", "urgent").code for _ in range(2)] == [0, 1]
    assert stored(tables, "b@example.com", "urgent") == ("urgent", None, None, None)
    for text in ("off", "0s"):
        assert "no redelivery" in storing("lanes", "set", "urgent", "--redeliver-for", text).stderr
        assert stored(tables, text + "@example.com", "urgent")[3] == 0.0


def test_a_lane_that_is_no_longer_in_the_settings_is_listed_and_unset(storing: CommandLine, tables: Books) -> None:
    tables.connection.execute("insert into lane_policy (lane, weight) values ('old', 5)")
    tables.connection.execute("insert into lane_rule (sender, lane) values ('@example.com', 'old')")

    (*_, old) = storing("lanes", "list", "--json").json["lanes"]
    assert (old["lane"], old["weight"], old["share"], old["senders"]) == ("old", 5.0, 0.0, ["@example.com"])
    assert storing("lanes", "unset", "old").code == storing("lanes", "unset", "--from", "@example.com").code == 0
    assert len(storing("lanes", "list", "--json").json["lanes"]) == 3


def test_ceilings_of_domains_are_set_listed_removed_and_audited(storing: CommandLine, tables: Books) -> None:
    assert "No recipient domain has a ceiling" in storing("domains", "list").stderr
    assert storing("domains", "list", "--json").json == {"domains": []}
    set_ = storing("domains", "set", "Example.org", "--per-second", "5", "--reason", "asked", "--actor", "ann")
    assert "example.org may get 5 emails per second." in set_.stderr
    both = storing("domains", "set", "example.org", "--concurrent", "2")
    assert "example.org may get 5 emails per second, 2 at the same time." in both.stderr
    listed = {"domain": "example.org", "per_second": 5.0, "concurrent": 2, "attempt_seconds": None, "waiting": 0}
    assert storing("domains", "list", "--json").json == {"domains": [listed]}
    assert "example.org" in storing("domains", "list").stdout

    removed, again = storing("domains", "remove", "example.org"), storing("domains", "remove", "example.org")
    assert (removed.code, removed.stderr.strip()) == (0, "The domain has no ceiling any more.")
    assert (again.code, "example.org has no ceiling" in again.stderr) == (1, True)
    acts = tables.connection.execute(
        "select actor, reason, detail from operator_audit where action = 'set_domain' order by audit_id"
    ).fetchall()
    assert acts[0] == ("ann", "asked", {"domain": "example.org", "per_second": 5, "concurrent": None})
    assert acts[2][2] == {"domain": "example.org", "removed": True}

    assert storing("domains", "set", "@Bücher.example", "--concurrent", "1").code == 0  # stored as in the DNS
    assert storing("domains", "list", "--json").json["domains"][0]["domain"] == "xn--bcher-kva.example"
    assert storing("domains", "remove", "bücher.example").code == 0


def test_status_list_and_show_have_the_emails_that_wait_for_a_domain(prepared: CommandLine, tables: Books) -> None:
    for domain in ("example.org", "idle.example"):
        assert prepared("domains", "set", domain, "--per-second", "5").code == 0
    one = ("--from", "a@example.com", "--to", "b@example.org", "--subject", "s", "--text", "t")
    assert prepared("enqueue", "--key", "k", *one).code == 0
    tables.connection.execute(
        "update email_log set status = 'waiting', wait_until = now() + interval '1 hour', publish_due_at = null,"
        " wait_reason = 'domain', wait_domain = 'example.org'"
    )

    waiting = {each["domain"]: each["waiting"] for each in prepared("domains", "list", "--json").json["domains"]}
    assert waiting == {"example.org": 1, "idle.example": 0}
    expected = {"domain": "example.org", "per_second": 5.0, "concurrent": None, "attempt_seconds": None, "waiting": 1}
    assert prepared("status", "--json").json["domains"] == [expected]
    assert "1 email waits: example.org may get 5 emails per second." in prepared("status").stdout
    assert "example.org may get 5 emails per second" in " ".join(prepared("show", "k").stdout.split())


def test_a_key_is_shown_once_stored_as_a_hash_and_revoked_by_its_id(storing: CommandLine, tables: Books) -> None:
    assert "loopback interface" in storing("keys", "list").stderr
    made = storing("keys", "create", "--name", "shop", "--from-domain", "Bücher.example", "--json").json
    secret = Secret.parse(made["key"])
    assert secret is not None
    (key,) = list_keys.sync(tables.connection)
    assert secret.matches(key.secret_hash)
    assert (key.scopes, key.sender_domains) == (frozenset({"send", "read"}), frozenset({"xn--bcher-kva.example"}))
    listed = storing("keys", "list").stdout
    assert (made["key_id"] in listed, secret.secret in listed) == (True, False)

    assert [storing("keys", "revoke", made["key_id"]).code for _ in range(2)] == [0, 1]
    assert storing("keys", "list", "--json").json == {"keys": []}
    (revoked,) = storing("keys", "list", "--all", "--json").json["keys"]
    assert (revoked["from_domains"], revoked["scopes"]) == (["xn--bcher-kva.example"], ["read", "send"])
    assert storing("keys", "show", made["key_id"], "--json").json == revoked
    lists = "--scope operate --scope read --allow-lane bulk --allow-lane normal --lane bulk"  # options that repeat
    assert storing("keys", "create", "--name", "ops", "--all-tenants", *lists.split()).code == 0
    (ops,) = storing("keys", "list", "--json").json["keys"]
    assert (ops["scopes"], ops["allowed_lanes"], ops["lane"]) == (["operate", "read"], ["bulk", "normal"], "bulk")
    assert (ops["tenant_id"], ops["from_domains"]) == (None, [])
    assert audited(tables)[:2] == [("create_key", "dispatcher keys create"), ("revoke_key", "dispatcher keys revoke")]


def test_the_secret_of_a_webhook_is_shown_once(storing: CommandLine) -> None:
    url = "https://shop.example.com/hooks"
    made = storing("webhooks", "add", url, "--tenant", "shop", "--events", "email.bounced,failed", "--json").json
    listed = storing("webhooks", "list", "--json")

    assert made["secret"].startswith("whsec_")
    assert made["secret"] not in listed.stdout
    (webhook,) = listed.json["webhooks"]
    assert (webhook["tenant_id"], webhook["events"]) == ("shop", ["email.failed", "email.bounced"])


def test_a_pause_says_how_many_emails_wait_and_doubts_names_that_have_none(storing: CommandLine, tables: Books) -> None:
    tables.enqueue(2, tenant_id="acme", lane="bulk")
    tables.enqueue(1, tenant_id="shop", lane="bulk")

    effects = {
        ("tenant", "acme"): "2 due emails wait because of it.",
        ("tenant", "acmee"): "The tenant 'acmee' has no email: check the name. 0 due emails wait because of it.",
        ("lane", "bulk"): "3 due emails wait because of it.",
        ("all",): "3 due emails wait because of it.",
        ("provider", "smtp"): "The provider 'smtp' has no email in the last 30 days: check the name.",
    }
    for what, effect in effects.items():
        assert effect in storing("pause", *what, "--reason", "ticket 4711").stderr, what
    listed = storing("pause", "list", "--json").json["pauses"]
    assert [(each["waiting"], each["has_emails"]) for each in listed] == [
        *((2, True), (0, False), (3, None), (3, None), (None, False))
    ]
