"""An operator enqueues a corrected copy of an email, with the same result through command, HTTP, page and client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from dispatcher.actions.resend import Resend
from dispatcher.broker.topology import Topology
from dispatcher.client.calls import call_of
from tests.api.ops_page.browsing import Browser, text_of
from tests.api.running_api import EMAIL, UNREACHABLE_AMQP_URL, Api, make_key, running, settings_of
from tests.cli.commandline import CommandLine

TO: Final = "Bob <bob@example.org>"
BODY: Final[dict[str, Any]] = EMAIL | {
    "cc": ["cc@example.org"],
    "headers": {"X-Order": "17", "X-Old": "1"},
    "tags": ["receipt"],
    "metadata": {"order": "17"},
    "topic": "newsletter",
    "attachments": [{"filename": "a.txt", "content_type": "text/plain", "content": "aGk="}],
}
COPIED: Final = """
    select e.email_id::text as id, message_key, status, resent_from::text, recipients, subject, sender, headers, tags,
        metadata, topic, text_body, lane, attachment_count,
        (select count(*) from email_attachment as a where a.email_id = e.email_id)
    from email_log as e
    join email_content as c using (email_id)
    where e.message_key <> 'k-1'
"""


@dataclass
class Desk:
    """The faces, and an email of the tenant `shop` that failed."""

    api: Api
    commands: CommandLine
    connection: psycopg.Connection
    key: str
    email_id: str

    def set(self, assignments: str) -> None:
        self.connection.execute(f"update email_log set {assignments} where message_key = 'k-1'".encode())  # noqa: S608

    def copies(self) -> list[dict[str, Any]]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(COPIED.encode()).fetchall()

    async def over_http(self, token: str = "", email_id: str = "", **fields: Any) -> Any:
        path = f"/v1/emails/{email_id or self.email_id}/resend"
        return await self.api.call("POST", path, body={"reason": "typo", **fields}, token=token or self.key)


@pytest.fixture
async def desk(
    tmp_path: Path, tables_url: str, topology_names: Topology, connection: psycopg.Connection
) -> AsyncIterator[Desk]:
    environment = {"DISPATCHER_RUN_DIR": str(tmp_path / "run"), "DISPATCHER_METRICS_ADDRESS": "off"}
    environment |= {"DISPATCHER_DATABASE_URL": tables_url, "DISPATCHER_QUEUE": topology_names.queue}
    commands = CommandLine(tmp_path, environment, needs_process=False)
    key = make_key(connection, scopes=["send", "read", "operate"])
    async with running(settings_of(tables_url, UNREACHABLE_AMQP_URL, topology_names, OPS="on")) as api:
        email_id = (await api.post("k-1", BODY, token=key)).json["id"]
        opened = Desk(api, commands, connection, key, email_id)
        opened.set("status = 'failed', publish_due_at = null")
        yield opened


@pytest.fixture
def database_url(tables_url: str) -> str:
    return tables_url


async def test_every_face_makes_the_same_copy_once_and_links_and_audits_it(desk: Desk) -> None:
    browser = Browser(desk.api)
    await browser.sign_in(desk.key)
    headers = "X-Campaign: spring\nx-old:"
    options = ["--to", TO, "--from", "billing@example.com", "--subject", "Hi", "--reason", "typo"]
    options += [word for line in headers.splitlines() for word in ("--header", line)]
    form = {"to": TO, "sender": "billing@example.com", "subject": "Hi", "headers": headers, "reason": "typo"}
    body: dict[str, Any] = form | {"to": [TO], "headers": {"X-Campaign": "spring", "x-old": ""}}

    posted = await desk.over_http(**body)
    repeated = await desk.over_http(**body)
    ended = await asyncio.to_thread(desk.commands, "resend", "k-1", *options, "--json")
    await browser.get(f"/ops/emails/{desk.email_id}/resend")
    await browser.submit(f"/emails/{desk.email_id}/resend", **form)
    page = text_of(await browser.get(f"/ops/emails/{desk.email_id}"))

    (copy,) = desk.copies()
    assert (posted.status, posted.headers["location"]) == (201, f"/v1/emails/{copy['id']}")
    assert posted.json == {
        "id": copy["id"],
        "message_key": copy["message_key"],
        "resent_from": desk.email_id,
        "is_known": False,
    }
    assert repeated.json == ended.json == posted.json | {"is_known": True}
    assert copy["recipients"] == {"to": [TO]}
    assert (copy["sender"], copy["subject"]) == ("billing@example.com", "Hi")
    assert copy["headers"] == {"X-Order": "17", "X-Campaign": "spring"}
    assert (copy["text_body"], copy["tags"], copy["metadata"]) == (EMAIL["text"], ["receipt"], {"order": "17"})
    assert copy["topic"] == "newsletter"
    assert (copy["attachment_count"], copy["count"], copy["status"], copy["lane"]) == (1, 1, "pending", "normal")
    old, new = [(await desk.api.get(f"/v1/emails/{each}", token=desk.key)).json for each in (desk.email_id, copy["id"])]
    assert (old["resent_as"], old["resent_from"], old["status"]) == ([copy["id"]], None, "failed")
    assert (new["resent_as"], new["resent_from"], new["topic"]) == (None, desk.email_id, "newsletter")
    assert copy["id"] in page
    *_, audited = desk.connection.execute(
        "select email_id::text, action, reason, detail from operator_audit"
    ).fetchall()
    changed = ["headers", "sender", "subject", "to"]
    assert audited == (desk.email_id, "resend", "typo", {"resent_as": copy["id"], "changed": changed})
    assert desk.connection.execute("select count(*) from email_recipient").fetchone() == (3,)


@pytest.mark.parametrize(
    ("assignments", "why"),
    [
        ("status = 'sent'", "The email is sent"),
        ("status = 'held'", "The email is held"),
        ("was_uncertain = true", "The outcome of an attempt is unknown"),
        ("recipient_outcomes = '{\"1\": null}'", "Some recipients have the email"),
    ],
)
async def test_a_copy_that_may_repeat_an_email_must_be_confirmed(desk: Desk, assignments: str, why: str) -> None:
    desk.set(assignments)
    browser = Browser(desk.api)
    await browser.sign_in(desk.key)

    refused = await desk.over_http()
    ended = await asyncio.to_thread(desk.commands, "resend", desk.email_id, "--reason", "lost")
    await browser.get(f"/ops/emails/{desk.email_id}/resend")
    page = await browser.submit(f"/emails/{desk.email_id}/resend", reason="lost")

    assert (refused.status, refused.code) == (409, "may-repeat")
    assert why in refused.json["detail"]
    assert (ended.code, page.status) == (2, 422)
    assert why in ended.stderr
    assert "Add --yes" in ended.stderr
    assert f"May repeat must be chosen. {why}" in text_of(page)
    assert desk.copies() == []
    page = await browser.submit(f"/emails/{desk.email_id}/resend", reason="lost", may_repeat="true")
    assert page.status == 303
    assert [each["recipients"] for each in desk.copies()] == [{"to": EMAIL["to"], "cc": ["cc@example.org"]}]
    assert (await desk.over_http(may_repeat=True)).json["is_known"]
    assert not (await desk.over_http(may_repeat=True, message_key="another")).json["is_known"]


async def test_what_cannot_be_resent_is_refused_and_changes_nothing(desk: Desk) -> None:
    await desk.api.post("taken", token=desk.key)
    before = desk.copies()
    bare, limited, foreign = (
        make_key(desk.connection, scopes=["operate"]),
        make_key(desk.connection, scopes=["operate", "send"], sender_domains=["example.net"]),
        make_key(desk.connection, scopes=["operate", "send"], tenant_id="other"),
    )
    wrong: dict[tuple[str, str], dict[str, Any]] = {
        ("invalid-body", "#/to/1"): {"to": ["ann@example.org", "bob"]},
        ("invalid-body", "#/headers/From"): {"headers": {"From": "x"}},
        ("invalid-body", "#/headers"): {"headers": ["x"]},
        ("invalid-body", "#/headers/X-A"): {"headers": {"X-A": 0}},
        ("email-not-allowed", "#/headers/Sensitivity"): {"headers": {"Sensitivity": "private"}},
    }
    for (code, pointer), fields in wrong.items():
        answer = await desk.over_http(**fields)
        assert (answer.code, answer.pointers) == (code, [pointer])
    assert (await desk.over_http(message_key="taken")).code == "idempotency-key-reused"
    assert (await desk.over_http(token=bare)).code == "insufficient-scope"
    assert (await desk.over_http(token=limited)).code == "sender-forbidden"
    assert (await desk.over_http(token=foreign)).code == "not-found"
    browser = Browser(desk.api)
    await browser.sign_in(limited)
    await browser.get(f"/ops/emails/{desk.email_id}/resend")
    page = await browser.submit(f"/emails/{desk.email_id}/resend", reason="typo")
    assert page.status == 409
    assert "is an address that this key may not send from" in text_of(page)
    states = {
        "status = 'waiting', wait_until = now() + interval '1 day'": "The email is waiting",
        "status = 'cancelled', wait_until = null, expires_at = now()": "it has expired",
        "expires_at = null": "its content was deleted",
    }
    for assignments, words in states.items():
        desk.set(assignments)
        if "content" in words:
            desk.connection.execute("delete from email_content where email_id = %s", [desk.email_id])
        answer = await desk.over_http()
        assert (answer.status, answer.code) == (409, "not-resendable")
        assert words in answer.json["detail"]
    assert desk.copies() == before
    assert desk.connection.execute("select count(*) from operator_audit where action = 'resend'").fetchone() == (0,)


async def test_an_expired_email_takes_nothing_from_the_quota(desk: Desk) -> None:
    key = make_key(desk.connection, scopes=["operate", "send"], recipients_per_day=2)
    desk.set("expires_at = now()")
    assert (await desk.over_http(token=key)).code == "not-resendable"
    desk.set("expires_at = null")
    assert (await desk.over_http(token=key)).status == 201
    assert (await desk.over_http(token=key, subject="Hi")).code == "quota-exceeded"
    assert len(desk.copies()) == 1


async def test_an_sms_is_resent_to_another_number(desk: Desk) -> None:
    sms = {"to": "+4915112345678", "text": "4711 is your code."}
    sms_id = (await desk.api.call("POST", "/v1/sms", key="s-1", body=sms, token=desk.key)).json["id"]
    desk.connection.execute("update email_log set status = 'failed' where email_id = %s", [sms_id])

    refused = await desk.over_http(email_id=sms_id, subject="Hi")
    made = await desk.over_http(email_id=sms_id, to=["+4915112345679"])

    assert (refused.code, refused.pointers) == ("invalid-body", ["#/subject"])
    copies = {each["id"]: each["recipients"] for each in desk.copies()}
    assert copies[made.json["id"]] == {"to": ["+4915112345679"]}


def test_the_client_sends_only_what_is_changed() -> None:
    call = call_of(Resend(email_id=UUID(int=7), to=("ann@example.org",), reason="typo"))

    assert call.path == f"/v1/emails/{UUID(int=7)}/resend"
    assert call.body == b'{"to":["ann@example.org"],"may_repeat":false,"reason":"typo"}'
