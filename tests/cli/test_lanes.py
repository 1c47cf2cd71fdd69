"""`dispatcher lanes` and `dispatcher tenants`, and the lane of an email when it is enqueued."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from dispatcher import Email, enqueue
from tests.cli.commandline import CommandLine


@pytest.fixture
def storing(storing: CommandLine) -> CommandLine:
    """`dispatcher` in the test's process."""
    return storing.without_process


def stored(connection: psycopg.Connection, sender: str, lane: str | None = None, **more: Any) -> tuple[object, ...]:
    """Enqueues an email; returns the lane and the policy in its row."""
    email = Email(
        message_key=f"{sender} {lane} {more}",
        sender=sender,
        to=["a@example.org"],
        subject="s",
        text="t",
        lane=lane,
        **more,
    )
    row = connection.execute(
        "select lane, on_uncertain, max_attempts, redeliver_seconds from email_log where email_id = %s",
        [enqueue(connection, email).email_id],
    ).fetchone()
    assert row is not None
    return row


def test_a_sender_s_rule_decides_the_lane_by_address_then_by_domain(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    assert storing("lanes", "set", "--from", "Otp@Example.com", "urgent").code == 0
    assert storing("lanes", "set", "--from", "@example.com", "bulk").code == 0

    assert stored(connection, "Login <OTP@EXAMPLE.COM>")[0] == "urgent"
    assert stored(connection, "news@example.com")[0] == "bulk"
    assert stored(connection, "news@mail.example.com")[0] == "normal"
    assert stored(connection, "otp@example.com", "bulk")[0] == "bulk"
    listed = storing("lanes", "list", "--json").json["lanes"]
    assert {each["lane"]: each["senders"] for each in listed} == {
        "urgent": ["otp@example.com"],
        "normal": [],
        "bulk": ["@example.com"],
    }

    assert storing("lanes", "unset", "--from", "otp@example.com").code == 0
    assert stored(connection, "otp@example.com")[0] == "bulk"
    details = connection.execute("select detail::text from operator_audit where action = 'set_lane'").fetchall()
    assert len(details) == 3
    assert "otp@" not in str(details)


def test_a_lane_s_policy_is_copied_into_the_row_unless_the_email_has_its_own(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    policy = ("--on-uncertain", "resend", "--max-attempts", "2", "--redeliver-for", "4h")
    assert storing("lanes", "set", "urgent", *policy, "--reason", "codes", "--actor", "ann").code == 0
    assert storing("lanes", "set", "urgent", "--weight", "80").code == 0

    assert stored(connection, "a@example.com", "urgent") == ("urgent", "resend", 2, 14400.0)
    assert stored(connection, "a@example.com", "urgent", on_uncertain="hold") == ("urgent", "hold", 2, 14400.0)
    assert stored(connection, "a@example.com") == ("normal", None, None, None)
    (urgent, normal, bulk) = storing("lanes", "list", "--json").json["lanes"]
    assert (urgent["weight"], urgent["on_uncertain"], urgent["max_attempts"]) == (80.0, "resend", 2)
    assert (normal["weight"], bulk["weight"]) == (40.0, 10.0)
    assert urgent["share"] == pytest.approx(80 / 130)
    audited = connection.execute("select actor, reason from operator_audit order by audit_id").fetchall()
    assert audited[0] == ("ann", "codes")

    assert storing("lanes", "unset", "urgent").code == 0
    assert storing("lanes", "unset", "urgent").code == 1
    assert stored(connection, "b@example.com", "urgent") == ("urgent", None, None, None)


@pytest.mark.parametrize("text", ["off", "0s"])
def test_redelivery_is_turned_off_for_a_lane(storing: CommandLine, connection: psycopg.Connection, text: str) -> None:
    ended = storing("lanes", "set", "urgent", "--redeliver-for", text)

    assert (ended.code, "no redelivery" in ended.stderr) == (0, True)
    assert stored(connection, "a@example.com", "urgent")[3] == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("set", "slow", "--weight", "1"), "'LANE': it must be one of DISPATCHER_LANES: urgent, normal, bulk"),
        (("set", "bulk"), "needs at least one of: --weight"),
        (("set", "bulk", "--from", "nothing"), "'--from': it must be an address (otp@example.com) or a domain"),
        (("unset",), "'LANE': it is required, or another one of: lane, sender"),
        (("unset", "bulk", "--from", "a@example.com"), "'LANE': it is required, or another one of: lane, sender"),
        (("unset", ""), "'LANE': it must be 1 to 100 printable characters"),
        (("set", "bulk", "--weight", "nan"), "'--weight': it must be a number from 0.001"),
        (("set", "bulk", "--weight", "1e-320"), "'--weight': it must be a number from 0.001"),
    ],
)
def test_a_wrong_lane_is_refused(storing: CommandLine, arguments: tuple[str, ...], words: str) -> None:
    ended = storing("lanes", *arguments)

    assert ended.code == 2
    assert words in " ".join(ended.stderr.split())


def test_what_is_set_for_a_lane_that_was_removed_from_the_settings_is_listed_and_unset(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    connection.execute("insert into lane_policy (lane, weight) values ('old', 5)")
    connection.execute("insert into lane_rule (sender, lane) values ('@example.com', 'old')")
    connection.commit()

    (*_, old) = storing("lanes", "list", "--json").json["lanes"]
    assert (old["lane"], old["weight"], old["share"], old["senders"]) == ("old", 5.0, 0.0, ["@example.com"])
    assert storing("lanes", "unset", "old").code == storing("lanes", "unset", "--from", "@example.com").code == 0
    assert len(storing("lanes", "list", "--json").json["lanes"]) == 3


def test_a_share_and_a_sender_s_lane_are_set_at_once_with_an_audit_record_each(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    assert storing("lanes", "set", "bulk", "--from", "a@example.com", "--weight", "5").code == 0

    assert stored(connection, "a@example.com")[0] == "bulk"
    details = [row[0] for row in connection.execute("select detail from operator_audit order by audit_id")]
    assert [(each["lane"], each.get("weight"), each.get("sender_domain")) for each in details] == [
        ("bulk", 5.0, None),
        ("bulk", None, "example.com"),
    ]


@pytest.mark.parametrize("option", ["--per-second", "--weight"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "1e-300"])
def test_a_tenant_s_limit_that_is_no_usable_number_is_refused(storing: CommandLine, option: str, value: str) -> None:
    assert storing("tenants", "set", "acme", option, value).code == 2


def test_limits_that_an_earlier_release_stored_count_as_usable_numbers(
    storing: CommandLine, connection: psycopg.Connection
) -> None:
    connection.execute(
        "insert into tenant_limit values ('nan', 'nan', 'nan'), ('tiny', 1e-300, 1e-300), ('no', 2, null)"
    )
    connection.execute("insert into lane_policy (lane, weight) values ('bulk', 'nan')")
    connection.commit()

    limits = {each.pop("tenant_id"): each for each in storing("tenants", "list", "--json").json["tenants"]}
    assert limits == {
        "nan": {"weight": 1.0, "per_second": 0.001},
        "tiny": {"weight": 1.0, "per_second": 0.001},
        "no": {"weight": 2.0, "per_second": None},
    }
    lanes = {each["lane"]: each["weight"] for each in storing("lanes", "list", "--json").json["lanes"]}
    assert lanes["bulk"] == 1.0


def test_an_email_in_an_unknown_lane_is_refused_with_the_lanes(storing: CommandLine) -> None:
    one = ("--from", "a@example.com", "--to", "b@example.org", "--subject", "s", "--text", "t")
    ended = storing("enqueue", "--key", "k", *one, "--lane", "slow")

    assert ended.code == 2
    assert "there is no lane 'slow'. DISPATCHER_LANES has: urgent, normal, bulk" in " ".join(ended.stderr.split())


def test_a_tenant_s_rate_and_share_are_set_and_unset(storing: CommandLine, connection: psycopg.Connection) -> None:
    assert "Nothing is set" in storing("tenants", "list").stderr
    assert "at most 50 emails per second" in storing("tenants", "set", "acme", "--per-second", "50").stderr
    assert storing("tenants", "set", "acme", "--weight", "2").code == 0
    listed = {"tenants": [{"tenant_id": "acme", "weight": 2.0, "per_second": 50.0}]}
    assert storing("tenants", "list", "--json").json == listed
    assert "acme" in storing("tenants", "list").stdout

    assert storing("tenants", "unset", "acme").code == 0
    assert storing("tenants", "unset", "acme").code == 1
    assert storing("tenants", "set", "acme").code == 2
    audited = connection.execute("select action from operator_audit").fetchall()
    assert audited == [("set_tenant",)] * 3
