"""The methods of both clients: one for each operation of the HTTP API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast, overload

from dispatcher.actions import dlq, domains, held, lanes, pauses, suppressions, tenants, unsent, webhooks
from dispatcher.actions.action import Action
from dispatcher.actions.audit import ListAudit
from dispatcher.actions.resend import Resend
from dispatcher.actions.stats import ListStats
from dispatcher.client import calls
from dispatcher.client.calls import ApiCall, call_of

P = ParamSpec("P")
T = TypeVar("T")


class Blocking:
    """A client whose methods return results."""


class Awaited:
    """A client whose methods return awaitables of results."""


class Method(Generic[P, T]):
    """A method of both clients: sends the request of a function. `AsyncClient` returns an awaitable."""

    def __init__(self, call: Callable[P, ApiCall[T]], action: type[object] | None = None) -> None:
        self._call = call
        self.action = action
        self.__doc__ = call.__doc__

    @overload
    def __get__(self, client: Blocking, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Awaited, kind: type) -> Callable[P, Awaitable[T]]: ...
    @overload
    def __get__(self, client: None, kind: type) -> Self: ...
    def __get__(self, client: Any, kind: type) -> Any:
        if client is None:
            return self

        def method(*arguments: P.args, **options: P.kwargs) -> Any:
            return client.send_call(self._call(*arguments, **options))

        method.__doc__ = self.__doc__
        return method


def _of(action: Callable[P, Action[T]]) -> Method[P, T]:
    """The method that carries out an action. Its arguments are the action's fields, as keywords."""

    def call(*arguments: P.args, **fields: P.kwargs) -> ApiCall[T]:
        return call_of(action(*arguments, **fields))

    call.__doc__ = action.__doc__
    return Method(call, cast("type[Action[T]]", action))


class Operations:
    """The operations. A list that the API returns in pages is a `Page`: a loop over a page continues with the pages
    after it (`for`, and with `AsyncClient` `async for`)."""

    send = Method(calls.send)
    send_many = Method(calls.send_many)
    get = Method(calls.get)
    get_by_key = Method(calls.get_by_key)
    find = Method(calls.find)
    cancel = Method(calls.cancel)
    cancel_emails = _of(unsent.Cancel)
    reschedule = Method(calls.reschedule)
    reschedule_emails = _of(unsent.Reschedule)
    resend = _of(Resend)
    confirm = Method(calls.confirm)
    confirm_emails = _of(held.Confirm)
    release = Method(calls.release)
    release_emails = _of(held.Release)
    list_held = _of(held.ListHeld)
    list_dead = _of(dlq.ListDead)
    discard_dead = _of(dlq.DiscardDead)
    list_replays = _of(dlq.ListReplays)
    preview_replay = _of(dlq.PreviewReplay)
    create_replay = _of(dlq.CreateReplay)
    get_replay = _of(dlq.GetReplay)
    stop_replay = _of(dlq.StopReplay)
    resume_replay = _of(dlq.ResumeReplay)
    list_suppressions = _of(suppressions.ListSuppressions)
    add_suppressions = _of(suppressions.AddSuppressions)
    remove_suppressions = _of(suppressions.RemoveSuppressions)
    list_webhooks = _of(webhooks.ListWebhooks)
    show_webhook = _of(webhooks.ShowWebhook)
    list_refused_events = _of(webhooks.ListRefused)
    add_webhook = _of(webhooks.AddWebhook)
    set_webhook = _of(webhooks.SetWebhook)
    test_webhook = Method(calls.webhook_test)
    enable_webhook = _of(webhooks.EnableWebhook)
    disable_webhook = _of(webhooks.DisableWebhook)
    rotate_webhook = _of(webhooks.RotateWebhook)
    replay_webhook = _of(webhooks.ReplayWebhook)
    remove_webhook = _of(webhooks.RemoveWebhook)
    list_pauses = _of(pauses.ListPauses)
    pause_all = _of(pauses.PauseAll)
    pause_lane = _of(pauses.PauseLane)
    pause_tenant = _of(pauses.PauseTenant)
    pause_provider = _of(pauses.PauseProvider)
    resume_all = _of(pauses.ResumeAll)
    resume_lane = _of(pauses.ResumeLane)
    resume_tenant = _of(pauses.ResumeTenant)
    resume_provider = _of(pauses.ResumeProvider)
    list_lanes = _of(lanes.ListLanes)
    set_lane = _of(lanes.SetLane)
    unset_lane = _of(lanes.UnsetLane)
    list_tenants = _of(tenants.ListTenants)
    set_tenant = _of(tenants.SetTenant)
    unset_tenant = _of(tenants.UnsetTenant)
    list_domains = _of(domains.ListDomains)
    set_domain = _of(domains.SetDomain)
    remove_domain = _of(domains.RemoveDomain)
    list_audit = _of(ListAudit)
    list_stats = _of(ListStats)
    _page = Method(calls.events)
