"""The methods of both clients: one for each operation of the HTTP API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast, overload

from dispatcher.actions.action import Action
from dispatcher.actions.audit import ListAudit
from dispatcher.actions.dlq import (
    CreateReplay,
    DiscardDead,
    GetReplay,
    ListDead,
    ListReplays,
    PreviewReplay,
    ResumeReplay,
    StopReplay,
)
from dispatcher.actions.domains import ListDomains, RemoveDomain, SetDomain
from dispatcher.actions.held import Confirm, ListHeld, Release
from dispatcher.actions.lanes import ListLanes, SetLane, UnsetLane
from dispatcher.actions.pauses import (
    ListPauses,
    PauseAll,
    PauseLane,
    PauseProvider,
    PauseTenant,
    ResumeAll,
    ResumeLane,
    ResumeProvider,
    ResumeTenant,
)
from dispatcher.actions.resend import Resend
from dispatcher.actions.stats import ListStats
from dispatcher.actions.suppressions import AddSuppressions, ListSuppressions, RemoveSuppressions
from dispatcher.actions.tenants import ListTenants, SetTenant, UnsetTenant
from dispatcher.actions.unsent import Cancel, Reschedule
from dispatcher.actions.webhooks import (
    AddWebhook,
    DisableWebhook,
    EnableWebhook,
    ListRefused,
    ListWebhooks,
    RemoveWebhook,
    ReplayWebhook,
    RotateWebhook,
    SetWebhook,
    ShowWebhook,
)
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
    cancel_emails = _of(Cancel)
    reschedule = Method(calls.reschedule)
    reschedule_emails = _of(Reschedule)
    resend = _of(Resend)
    confirm = Method(calls.confirm)
    confirm_emails = _of(Confirm)
    release = Method(calls.release)
    release_emails = _of(Release)
    list_held = _of(ListHeld)
    list_dead = _of(ListDead)
    discard_dead = _of(DiscardDead)
    list_replays = _of(ListReplays)
    preview_replay = _of(PreviewReplay)
    create_replay = _of(CreateReplay)
    get_replay = _of(GetReplay)
    stop_replay = _of(StopReplay)
    resume_replay = _of(ResumeReplay)
    list_suppressions = _of(ListSuppressions)
    add_suppressions = _of(AddSuppressions)
    remove_suppressions = _of(RemoveSuppressions)
    list_webhooks = _of(ListWebhooks)
    show_webhook = _of(ShowWebhook)
    list_refused_events = _of(ListRefused)
    add_webhook = _of(AddWebhook)
    set_webhook = _of(SetWebhook)
    test_webhook = Method(calls.webhook_test)
    enable_webhook = _of(EnableWebhook)
    disable_webhook = _of(DisableWebhook)
    rotate_webhook = _of(RotateWebhook)
    replay_webhook = _of(ReplayWebhook)
    remove_webhook = _of(RemoveWebhook)
    list_pauses = _of(ListPauses)
    pause_all = _of(PauseAll)
    pause_lane = _of(PauseLane)
    pause_tenant = _of(PauseTenant)
    pause_provider = _of(PauseProvider)
    resume_all = _of(ResumeAll)
    resume_lane = _of(ResumeLane)
    resume_tenant = _of(ResumeTenant)
    resume_provider = _of(ResumeProvider)
    list_lanes = _of(ListLanes)
    set_lane = _of(SetLane)
    unset_lane = _of(UnsetLane)
    list_tenants = _of(ListTenants)
    set_tenant = _of(SetTenant)
    unset_tenant = _of(UnsetTenant)
    list_domains = _of(ListDomains)
    set_domain = _of(SetDomain)
    remove_domain = _of(RemoveDomain)
    list_audit = _of(ListAudit)
    list_stats = _of(ListStats)
    _page = Method(calls.events)
