"""Through command, HTTP, page and client, an action takes the same fields, makes the same change, and refuses alike."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

import jsonschema
import psycopg
import pytest

from dispatcher.actions import all_actions
from dispatcher.actions.action import Action, Change, Mistakes, Reach, Refused, example, field, path_of, read
from dispatcher.actions.batch import Batch
from dispatcher.actions.dlq import ListDead
from dispatcher.actions.held import ListHeld
from dispatcher.actions.resend import Resend
from dispatcher.actions.runner import Face, Who, tenant_of
from dispatcher.actions.suppressions import AddSuppressions
from dispatcher.actions.tenants import ListTenants, SetTenant, UnsetTenant
from dispatcher.actions.unsent import Cancel, Reschedule
from dispatcher.actions.webhooks import AddWebhook, ReplayWebhook
from dispatcher.api.batch_face import BATCHES, schemas
from dispatcher.api.face import body_of, operation
from dispatcher.api.ops_page.fields import page_name
from dispatcher.broker.topology import Topology
from dispatcher.cli.batch_face import batch_command
from dispatcher.cli.face import command
from dispatcher.client import ApiProblem, Client
from dispatcher.client.calls import call_of
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from dispatcher.domain.controls import TenantLimit
from dispatcher.domain.kinds import TENANT, Wrong
from dispatcher.domain.stats import Tenant
from dispatcher.store.queries import all_queries
from tests.api.ops_page.browsing import Browser, forms_of
from tests.api.running_api import EMAIL, UNREACHABLE_AMQP_URL, Answer, Api, make_key, running, settings_of
from tests.cli.commandline import CommandLine
from tests.test_sql import prepared

ACTIONS = all_actions()
ELSEWHERE = (Batch, Resend)  # tests/test_resend.py
CHANGES = [each for each in ACTIONS if issubclass(each, Change) and each.http and not issubclass(each, ELSEWHERE)]
SUBJECTS = sorted({each.noun() for each in CHANGES})
LISTINGS = [each for each in ACTIONS if each.is_list and each.http and not each.path_names()]


@pytest.fixture
def database_url(tables_url: str) -> str:
    return tables_url


@pytest.fixture
def settings(servers: Servers, tables_url: str, topology_names: Topology) -> Settings:
    return settings_of(tables_url, UNREACHABLE_AMQP_URL, topology_names, OPS="on")


@pytest.fixture
def commands(tmp_path: Path, tables_url: str, topology_names: Topology) -> CommandLine:
    environment = {"DISPATCHER_RUN_DIR": str(tmp_path / "run"), "DISPATCHER_METRICS_ADDRESS": "off"}
    environment |= {"DISPATCHER_DATABASE_URL": tables_url, "DISPATCHER_QUEUE": topology_names.queue}
    return CommandLine(tmp_path, environment, needs_process=False)


def path(action: type[Action[Any]], given: Mapping[str, Any]) -> str:
    return action.http.split()[1].format_map(given)


def text_of(answer: Answer) -> str:
    return " ".join(unescape(answer.body.decode()).split())


def _tenant(action: type[Action[Any]]) -> dict[str, Any]:
    """The tenant that a request with a key of all tenants must name; command and page use it unasked."""
    return {} if action.reach is Reach.ALL_TENANTS else {"tenant_id": "default"}


async def over_http(api: Api, action: type[Action[Any]], given: Mapping[str, Any], token: str) -> Answer:
    body = {name: value for name, value in {**_tenant(action), **given}.items() if name not in action.path_names()}
    return await api.call(action.http.split()[0], path(action, given), body=body, token=token)


ON_ANOTHER_PAGE = {
    "suppressions remove",
    *(f"webhooks {verb}" for verb in ("set", "enable", "disable", "rotate", "replay", "remove")),
}
"""Actions whose forms are on the page of one row, or in a list that was searched."""


async def on_page(
    browser: Browser, action: type[Action[Any]], given: Mapping[str, str], *, has_form: bool = False
) -> Answer:
    """Sends an action's form. One form may have buttons for several actions; a row that is gone has none any more."""
    page = await browser.get(f"/ops/{_page_of(action.name)}")
    has_form = has_form and action.name not in ON_ANOTHER_PAGE
    assert not has_form or f'action="/ops{path_of(action)}"' in page.body.decode(), (
        f"the page has no form for {action.name}"
    )
    token = next(dict(form.fields)["csrf_token"] for form in forms_of(page) if "csrf_token" in form.names())
    return await browser.post(f"/ops{path_of(action)}", {"csrf_token": token, **given})


def words_on_command_line(action: type[Action[Any]], given: Mapping[str, Any]) -> list[str]:
    words = [*action.name.split(), *(_text(given[name]) for name in action.argument_names())]
    for name, value in given.items():
        if name not in action.argument_names():
            words += [action.fields[name].flag] if value is True else [action.fields[name].flag, _text(value)]
    return words


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("subject", SUBJECTS)
async def test_all_faces_make_the_same_changes_and_audit_rows_and_refuse_in_the_same_words(
    settings: Settings, commands: CommandLine, connection: psycopg.Connection, subject: str
) -> None:
    """Runs the examples of all changes of the subject through each face, and the last one again, which is refused."""
    changes = [each for each in CHANGES if each.noun() == subject]
    key = make_key(connection, scopes=["operate"], tenant_id=None, name="ann")
    results: dict[str, list[Any]] = {}
    refusals: dict[str, str] = {}
    async with running(settings) as api:
        browser = Browser(api)
        await browser.sign_in(key)
        for face in ("command", "http", "page"):
            for number, action in enumerate([*changes, changes[-1]]):
                tenant = {} if action.reach is Reach.ALL_TENANTS else {"tenant_id": "shop"}
                given = {**example(action), **tenant}
                if face == "command":
                    done = await asyncio.to_thread(commands, *words_on_command_line(action, given))
                    refusals[face] = " ".join(done.stderr.split()) if done.code else ""
                elif face == "http":
                    answer = await over_http(api, action, given, key)
                    refusals[face] = answer.json["detail"] if answer.status >= 400 else ""
                else:
                    texts, is_first = {name: _text(each) for name, each in given.items()}, number < len(changes)
                    answer = await on_page(browser, action, texts, has_form=is_first)
                    refusals[face] = text_of(answer) if answer.status >= 400 else ""
            results[face] = _audited(connection)

    assert results["command"] == results["http"] == results["page"]
    assert len(results["http"]) == len(changes)
    asked = changes[-1]
    if not asked.refusals:
        return  # the action may be repeated
    refused = read(asked, example(asked), {}).refused()
    assert refusals["http"] == refused.message  # its remedy names a command
    assert f"{refused.message} {refused.remedy}" in refusals["page"]
    assert all(sentence in refusals["command"] for sentence in (refused.message, str(refused.remedy)))


def _page_of(name: str) -> str:
    subject, _, verb = name.partition(" ")
    pages = {"find": "emails", "pause": "pauses", "resume": "pauses"}
    return {**pages, "dlq": {"list": "dead-letters"}.get(verb, verb)}.get(subject, subject)


def _audited(connection: psycopg.Connection) -> list[Any]:
    wanted = "select action, reason, detail from operator_audit where action <> 'sign_in' order by audit_id"
    rows = connection.execute(wanted).fetchall()
    connection.execute("alter table operator_audit disable trigger all")
    connection.execute("delete from operator_audit")
    connection.execute("alter table operator_audit enable trigger all")
    connection.execute("truncate webhook restart identity cascade")
    connection.commit()
    return [(action, reason, _lasting(detail)) for action, reason, detail in rows]


def _lasting(detail: dict[str, Any] | None) -> dict[str, Any]:
    lasting = (detail or {}).items()
    return {
        name: each for name, each in lasting if not name.endswith(("_id", "_ids")) and name not in ("since", "until")
    }


async def test_all_faces_report_all_mistakes_at_once_in_the_same_words(
    settings: Settings, commands: CommandLine, connection: psycopg.Connection
) -> None:
    key = make_key(connection, scopes=["operate"], tenant_id=None, name="ann")
    async with running(settings) as api:
        browser = Browser(api)
        await browser.sign_in(key)
        for action in CHANGES:
            fields = {name: each.kind for name, each in action.fields.items()}
            mistakes = {name: _mistake(kind) for name, kind in fields.items() if not (kind.choices or kind.is_flag)}
            wrong = {name: text for name, (text, _) in mistakes.items()}
            rules = [rule for _, broken in mistakes.values() for rule in broken]
            body = {name: fields[name].parse(each) if fields[name].is_list else each for name, each in wrong.items()}
            answer = await over_http(api, action, body, key)
            page = text_of(await on_page(browser, action, wrong))
            done = await asyncio.to_thread(commands, *words_on_command_line(action, wrong))

            assert [each["detail"] for each in answer.json["errors"]] == rules, action.name
            assert [rule for rule in rules if rule not in page] == [], action.name
            assert done.code == 2
            assert [rule for rule in rules if rule not in " ".join(done.stderr.split())] == [], action.name
    assert _audited(connection) == []


def _mistake(kind: Any) -> tuple[str, list[str]]:
    for text in ("-", "x" * 501):
        try:
            kind.of_text(text)
        except Wrong as error:
            return text, [rule for _, rule in error.mistakes]
    raise AssertionError(f"no wrong text for {kind}")


async def test_a_list_has_the_same_filters_and_document_in_all_faces(
    settings: Settings, commands: CommandLine, connection: psycopg.Connection
) -> None:
    key = make_key(connection, scopes=["read", "operate"], tenant_id=None)
    async with running(settings) as api:
        browser = Browser(api)
        await browser.sign_in(key)
        for action in LISTINGS:
            path, fields = _page_of(action.name), set(action.fields)
            answer = await api.call("GET", f"{action.http.split()[1]}?{urlencode(_tenant(action))}", token=key)
            page = await browser.get(f"/ops/{path}")
            tenant = ("--tenant", "default") if _tenant(action) else ()
            listed = await asyncio.to_thread(commands, *action.name.split(), *tenant, "--json")

            assert listed.json == answer.json, action.name
            assert {each["name"] for each in operation(action).parameters} == fields
            assert {each.name for each in command(action).params} - {"as_json", "as_csv"} == fields
            lists = [each for each in forms_of(page) if each.method == "get" and each.action.endswith(f"/{path}")]
            shown = {name for form in lists for name in form.controls}
            assert shown - {"q", "by"} == {page_name(each) for each in fields - {"after", "limit"}}, action.name


@pytest.mark.parametrize("action", BATCHES, ids=lambda each: each.name)
def test_a_batch_has_the_same_filters_in_all_faces(action: type[Batch]) -> None:
    options = {each.name for each in batch_command(action).params} - {"names", "actor", "yes", "as_json"}
    assert options == set(action.fields) - {"email_ids"}
    assert set(body_of(action)["properties"]) == set(action.fields)


@pytest.mark.parametrize(
    ("action", "given", "fits"),
    [
        (Reschedule, {"now": True}, True),
        (Reschedule, {"now": False}, False),
        (Reschedule, {"now": False, "send_in_seconds": 5}, True),
        (Reschedule, {"now": True, "send_in_seconds": 5}, False),
        (SetTenant, {"weight": 2}, True),
        (SetTenant, {}, False),
        (AddSuppressions, {"recipients": ["example.org"], "days": 3}, True),
        (AddSuppressions, {"recipients": ["example.org"], "days": 3, "expires_at": "2099-01-01T00:00:00Z"}, False),
        (ReplayWebhook, {"since": "2h"}, True),
        (ReplayWebhook, {"since": "2026-11-21T10:00Z"}, True),
        (ReplayWebhook, {"since": "yesterday"}, False),
        (AddWebhook, {"url": "https://shop.example.com/hooks?a=@"}, True),
        (AddWebhook, {"url": "https://ann@shop.example.com/hooks"}, False),
    ],
)
def test_schema_and_validation_state_equal_rules(action: type[Action[Any]], given: dict[str, Any], fits: bool) -> None:
    given = {"reason": "why", **given}
    in_path = dict.fromkeys(action.path_names(), "1")

    assert jsonschema.Draft202012Validator(body_of(action)).is_valid(given) is fits
    try:
        read(action, given, in_path, is_reason_required=True)
    except Mistakes:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize(
    ("action", "given", "in_path", "words"),
    [
        (SetTenant, {"weight": 2, "tenant_id": "shop"}, {"tenant_id": "acme"}, "must leave out tenant_id"),
        (SetTenant, {"wieght": 2, "tenant_id": "acme"}, {}, "did you mean weight?"),
        (Reschedule, {"now": False}, {}, "another one of"),
        (Cancel, {"email_ids": [str(UUID(int=7)), "x", 5], "reason": "r"}, {}, "UUID"),
    ],
)
def test_a_mistake_in_a_request_is_explained(
    action: type[Action[Any]], given: dict[str, Any], in_path: dict[str, str], words: str
) -> None:
    with pytest.raises(Mistakes, match=words) as caught:
        read(action, given, in_path)
    if "did you mean" in words:
        assert caught.value.mistakes[0].field == "wieght"
    if action is Cancel:
        assert [(each.field, each.path) for each in caught.value.mistakes] == [("email_ids", "1"), ("email_ids", "2")]


@pytest.mark.parametrize("given", [{}, {"all": False}, {"all": True}, {"dry_run": True}, {"tag": "sale"}], ids=str)
def test_the_published_schema_of_a_batch_demands_what_selects_emails(given: dict[str, Any]) -> None:
    asked = read(Cancel, given, {})

    is_valid = jsonschema.Draft202012Validator(schemas()["Cancel"]).is_valid({"reason": "why", **given})

    assert is_valid == (asked.dry_run or asked.is_selecting())


@pytest.mark.parametrize("action", ACTIONS, ids=lambda each: each.name)
def test_every_example_is_valid(action: type[Action[Any]]) -> None:
    assert action.examples
    for line in action.examples:
        assert shlex.split(line)[: len(action.name.split())] == action.name.split()
        read(action, example(action, line), {})


def test_every_row_type_has_the_columns_of_its_query(tables_url: str) -> None:
    with psycopg.connect(tables_url, autocommit=True) as connection:
        for name, kind in {name: kind for action in ACTIONS for name, kind in action.rows().items()}.items():
            statement = prepared(name, all_queries()[name].decode())
            assert statement is not None
            connection.execute(statement)
            described = connection.pgconn.describe_prepared(name.encode())
            columns = tuple((described.fname(at) or b"").decode() for at in range(described.nfields))
            assert columns == kind.__match_args__[: len(columns)], name


def test_the_actions_load_neither_the_database_nor_the_api() -> None:
    heavy = {"psycopg", "starlette", "msgspec", "fastapi", "pika", "asyncio"}
    code = f"import sys; from dispatcher.actions import all_actions; all_actions(); print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


async def test_the_client_runs_actions_and_returns_rows(settings: Settings, connection: psycopg.Connection) -> None:
    async with running(settings) as api:

        def use() -> list[Any]:
            with Client(api.url) as client:
                found: list[Any] = [client.run(SetTenant(tenant_id="acme", weight=3.0, reason="more"))]
                found += [client.run(ListTenants()), client.run(UnsetTenant(tenant_id="acme", reason="over"))]
                with pytest.raises(ApiProblem) as caught:
                    client.run(UnsetTenant(tenant_id="acme", reason="over"))
                return [*found, caught.value.code]

        used = await asyncio.to_thread(use)
    limit = TenantLimit("acme", 3.0, None)
    assert used == [limit, [Tenant("acme", 3.0)], limit, "not-found"]


async def test_a_key_of_one_tenant_or_without_the_scope_may_not_change_what_tenants_share(
    settings: Settings, connection: psycopg.Connection
) -> None:
    one = make_key(connection, scopes=["operate"], tenant_id="acme")
    reader = make_key(connection, scopes=["read"], tenant_id=None)
    async with running(settings) as api:
        answers = [await over_http(api, SetTenant, example(SetTenant), token) for token in (one, reader)]
        misspelt = await api.call("PUT", "/v1/tenants/acme", body={"wieght": 2, "reason": "r"}, token=reader)
    assert [(each.status, each.code) for each in answers] == [(403, "insufficient-scope")] * 2
    assert misspelt.status == 403


async def test_a_list_takes_what_the_client_sends_and_hides_hosts_from_a_tenant(
    settings: Settings, connection: psycopg.Connection
) -> None:
    async with running(settings) as api:
        email_id = (await api.post("a", EMAIL | {"tenant_id": "shop"})).json["id"]
        connection.execute(
            "update email_log set status = 'held', publish_due_at = null, created_at = now() - interval '2 hours'"
        )
        connection.execute(
            "insert into email_attempt (email_id, attempt_number, worker, provider, started_at, finished_at, outcome)"
            " values (%s, 1, 'host-7', 'smtp', now(), now(), 'uncertain')",
            [email_id],
        )
        one, every = (make_key(connection, scopes=["operate"], tenant_id=tenant) for tenant in ("shop", None))
        for action, count in ((ListDead(older_than_seconds=3600.0), 1), (ListHeld(newer_than_seconds=3600.0), 0)):
            answer = await api.get(call_of(action).path, token=one)
            assert (answer.status, len(answer.json["emails"])) == (200, count)
        (own,) = (await api.get("/v1/held?older_than_seconds=60.0000000000000002", token=one)).json["emails"]
        (all_,) = (await api.get("/v1/held?tenant_id=shop", token=every)).json["emails"]
    assert (own["email_id"], own["worker"], all_["worker"]) == (email_id, None, "host-7")


@pytest.mark.parametrize(
    ("face", "reach", "own", "given", "expected"),
    [
        (Face.COMMAND, Reach.ONE_TENANT, None, None, "default"),
        (Face.COMMAND, Reach.ANY_TENANT, None, None, None),
        (Face.COMMAND, Reach.ANY_TENANT, None, "acme", "acme"),
        (Face.PAGE, Reach.ONE_TENANT, None, None, "default"),
        (Face.PAGE, Reach.ONE_TENANT, "acme", None, "acme"),
        (Face.PAGE, Reach.ANY_TENANT, "acme", "shop", "tenant-forbidden"),
        (Face.OPEN_HTTP, Reach.ANY_TENANT, None, None, "default"),
        (Face.HTTP, Reach.ANY_TENANT, None, None, "tenant-missing"),
        (Face.HTTP, Reach.SEEN_TENANTS, None, None, None),
        (Face.HTTP, Reach.SEEN_TENANTS, "acme", None, "acme"),
        (Face.HTTP, Reach.ONE_TENANT, None, "acme", "acme"),
        (Face.HTTP, Reach.ONE_TENANT, "acme", None, "acme"),
        (Face.HTTP, Reach.ONE_TENANT, "acme", "acme", "acme"),
        (Face.HTTP, Reach.ONE_TENANT, "acme", "shop", "tenant-forbidden"),
    ],
)
def test_the_tenant_follows_from_face_reach_key_and_request(
    face: Face, reach: Reach, own: str | None, given: str | None, expected: str | None
) -> None:
    class Some(Change[TenantLimit], name="some do", reach=reach):
        tenant_id: str | None = field(TENANT, "The tenant.", default=None)

    try:
        found = tenant_of(Some, Who(face, tenant_id=own), given)
    except Refused as error:
        found = error.code
    assert found == expected


@pytest.mark.parametrize("after", ["-", "e30", "WyIxIl0", "WyJ4IiwgIjEiXQ", "é"])
def test_a_paged_list_refuses_what_is_not_the_end_of_one_of_its_pages(after: str) -> None:
    with pytest.raises(Mistakes):
        read(ListDead, {}, {"after": after})
