"""The status endpoints show an email only to its tenant, and never show its content."""

from __future__ import annotations

from dataclasses import replace

import psycopg

from dispatcher.config import Settings
from tests.api.ops_page.rows import write
from tests.api.running_api import EMAIL, Api, make_key, running
from tests.store.books import Books


async def test_an_email_is_found_by_id_and_by_key_without_its_content(api: Api) -> None:
    made = await api.post("order/17?x%")

    by_id = await api.get(made.headers["location"])
    by_key = await api.get("/v1/emails/by-key/order%2F17%3Fx%25")

    assert by_id.status == by_key.status == 200
    assert by_id.json == by_key.json
    assert by_id.json["status"] == "pending"
    assert by_id.json["attempts"] == []
    for private in ("ann@example.org", "shop@example.com", "receipt", "Thank you"):
        assert private not in by_id.body.decode()


async def test_recipients_refused_or_delivered_in_part_are_listed(api: Api, connection: psycopg.Connection) -> None:
    path = f"/v1/emails/{(await api.post('k-1')).json['id']}"
    connection.execute(
        "update email_log set status = 'sent',"
        " last_error = 'refused recipients: 2 (550 5.1.1), 3 (451); 250 2.0.0 Ok',"
        """ recipient_outcomes = '{"2": null, "10": null, "1": null, "3": "550"}'"""
    )
    found = (await api.get(path)).json
    listed = (await api.get("/v1/emails?status=sent")).json["emails"]
    assert (found["status"], found["error"], found["refused_recipients"]) == ("sent", None, "2 (550 5.1.1), 3 (451)")
    assert listed[0]["refused_recipients"] == found["refused_recipients"]
    assert found["delivered_recipients"] is None

    for status in ("failed", "pending"):
        connection.execute("update email_log set status = %s", [status])
        for each in (path, "/v1/emails/by-key/k-1"):
            assert (await api.get(each)).json["delivered_recipients"] == "1-2, 10"


async def test_an_email_has_its_tags_times_last_event_and_only_with_the_scope_its_envelope(
    api: Api, connection: psycopg.Connection
) -> None:
    reader, owner = (make_key(connection, scopes=["read", *more]) for more in ((), ("send", "content")))
    times = {"send_at": "2027-01-01T00:00:00Z", "expires_at": "2027-01-02T00:00:00Z"}
    body = EMAIL | times | {"tags": ["receipt"], "metadata": {"order": "17"}, "cc": ["bob@example.org"]}
    email_id = (await api.post("k-1", body, token=owner)).json["id"]
    for kind, minute, doubt in (("opened", 2, None), ("bounced", 3, "impossible"), ("delivered", 1, None)):
        connection.execute(
            "insert into email_event (email_id, event_key, provider, kind, bounce, doubt, happened_at)"
            " values (%s, %s, 'ses', %s, %s, %s, timestamptz '2026-12-01 00:00Z' + %s * interval '1 minute')",
            [email_id, kind.encode(), kind, "hard" if kind == "bounced" else None, doubt, minute],
        )

    for path in (f"/v1/emails/{email_id}", "/v1/emails/by-key/k-1", "/v1/emails?tag=receipt&metadata=order=17"):
        plain, whole = [(await api.get(path, token=key)).json for key in (reader, owner)]
        seen, shown = (plain["emails"][0], whole["emails"][0]) if "emails" in plain else (plain, whole)
        assert {name: seen[name].replace("+00:00", "Z") for name in times} == times
        assert (seen["tags"], seen["metadata"], seen["envelope"]) == (["receipt"], {"order": "17"}, None)
        assert seen["last_event"] == {"kind": "opened", "at": "2026-12-01T00:02:00+00:00"}
        envelope = {"from": EMAIL["from"], "to": EMAIL["to"], "cc": ["bob@example.org"], "bcc": []}
        assert shown == seen | {"envelope": envelope | {"subject": EMAIL["subject"]}}
    connection.execute("delete from email_content")
    erased = (await api.get(f"/v1/emails/{email_id}", token=owner)).json
    assert (erased["tags"], erased["metadata"], erased["envelope"]) == (None, None, None)


async def test_unknown_paths_ids_and_keys_are_not_found_and_other_methods_are_named(api: Api) -> None:
    emails = ("01a1fdbb-be69-7a25-b06b-c86d7b44862b", "nonsense", "by-key/nothing", "by-key/%00")

    for path in ("/v2", *(f"/v1/emails/{email}" for email in emails)):
        answer = await api.get(path)
        assert (answer.status, answer.code) == (404, "not-found")
    for query in ("stat=x", "tenant_id=a&tenant_id=a"):
        assert (await api.get(f"/v1/emails/by-key/nothing?{query}")).code == "invalid-parameter"
    answer = await api.get("/v1/emails/batch")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


INVALID = {
    "status=lost": "",
    "error_type=rejectd": "rejected_recipient",
    "limit=0": "",
    "limit=1001": "",
    "limit=x": "",
    "limit=1&limit=1": "twice",
    "after=x": "",
    "created_from=x": "",
    "created_from=0001-01-01T00:00:00%2B14:00": "",
    "recipient=secret%20secret@": "",
    "domain=secret%20secret@": "",
    "sender=secret%20secret@": "",
    "metadata=order:17": "must be a key and its value, such as order=4711",
    "stat=x": "did you mean status?",
}


async def test_a_browser_is_redirected_from_the_root_to_the_documentation_or_the_operators_page(
    api: Api, settings: Settings
) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml;q=0.9"}

    home = await api.get("/", headers=browser)
    assert (home.status, home.headers["location"]) == (307, "/docs")
    assert (await api.get("/")).code == "not-found"
    async with running(replace(settings, ops=True)) as with_page:
        assert (await with_page.get("/", headers=browser)).headers["location"] == "/ops"


async def test_an_invalid_parameter_is_named_and_an_address_is_not_repeated(api: Api) -> None:
    for query, words in INVALID.items():
        answer = await api.get(f"/v1/emails?{query}")
        assert (answer.status, answer.code) == (400, "invalid-parameter"), query
        assert words or answer.json["errors"][0]["parameter"] == query.partition("=")[0]
        assert words in answer.body.decode()
        assert "secret" not in answer.body.decode()
    for instant in ("2020-01-01T00:00:00Z", "0629-09-09t15:13:57.59z", "2020-01-01%2010:00"):
        assert (await api.get(f"/v1/emails?created_from={instant}")).status == 200, instant


async def test_a_tenant_sees_only_its_own_emails(api: Api, connection: psycopg.Connection) -> None:
    foreign = await api.post("k-1", EMAIL | {"tenant_id": "other"})
    token = make_key(connection)
    own = await api.post("k-1", token=token)

    assert (await api.get(foreign.headers["location"], token=token)).status == 404
    assert (await api.get(own.headers["location"], token=token)).status == 200
    assert [email["id"] for email in (await api.get("/v1/emails", token=token)).json["emails"]] == [own.json["id"]]
    assert (await api.get("/v1/emails?tenant_id=other", token=token)).code == "tenant-forbidden"


async def test_the_timeline_has_no_operator_and_no_reason(api: Api, books: Books) -> None:
    email_id = (await api.post("k-1")).json["id"]
    for action in ("reveal", "release"):
        write(books, "operator_audit", actor="carol@ops", action=action, reason="secret", email_id=email_id)

    document = (await api.get(f"/v1/emails/{email_id}")).json

    what = [moment["what"] for moment in document["timeline"]]
    assert (what[0], what[-1]) == ("enqueued", "release")
    for private in ("carol", "secret", "reveal"):
        assert private not in str(document)
