"""Failed and held emails, their dead letters, and replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID

from dispatcher.actions.action import Action, Change, Listing, Paged, Reach, Refusal, field
from dispatcher.actions.batch import Batch, Verdict
from dispatcher.domain.failures import (
    DEAD,
    DEFAULT_PER_SECOND,
    MAX_PER_SECOND,
    MIN_PER_SECOND,
    SAMPLE,
    DeadEmail,
    Forecast,
    ItemOutcome,
    Replay,
    Selection,
)
from dispatcher.domain.kinds import AGE, EMAIL_IDS, FILTER_TEXT, FLAG, METADATA, TENANT, Kind, number, one_of, whole
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.errors import InvalidEmail

R = TypeVar("R")


def _provider(value: object) -> str:
    """The name of a provider. A misspelt name would select nothing, and look as if no email had failed."""
    from dispatcher.config import BUILT_IN
    from dispatcher.config.plugins import provider_names
    from dispatcher.domain.accounts import provider_of

    # To search the installed packages takes 180 ms.
    if (provider := provider_of(str(value))) not in BUILT_IN and provider not in (known := provider_names()):
        raise InvalidEmail("provider", f"must be one of: {', '.join(known)}; or an account, such as smtp:billing")
    return str(value)


PROVIDER: Final = Kind(
    "must be the name of a provider", {"type": "string", "minLength": 1, "maxLength": 255}, _provider, metavar="NAME"
)
OUTCOMES: Final = {
    ItemOutcome.REPLAYED: "can be sent again",
    ItemOutcome.ALREADY_SENT: "already sent",
    ItemOutcome.UNDER_WAY: "already pending, waiting or being sent",
    ItemOutcome.CANCELLED: "cancelled",
    ItemOutcome.EXPIRED: "cannot be sent again: expired",
    ItemOutcome.DISCARDED: "discarded; `dispatcher dlq replay ID` can still send a discarded email again",
    ItemOutcome.MAY_HAVE_ARRIVED: "may have arrived: held, or an attempt got no answer; add --held to replay them, too",
    ItemOutcome.CONTENT_PRUNED: "cannot be sent again: content was deleted",
    ItemOutcome.UNKNOWN: "no such email",
}
"""What a replay says of an email, by the outcome."""
PENDING_AGAIN: Final = "The email is pending, and will be sent again."
TWICE: Final = "The recipient may get the email twice."
REPLAY_ID: Final = replace(whole(1, 2**63 - 1), metavar="REPLAY")
PER_SECOND: Final = number(MIN_PER_SECOND, MAX_PER_SECOND)
OWN_RATE: Final = "Keep this replay's own rate even if a running replay includes some of the same emails."
ROWS: Final = whole(1, 10_000)


class FailureFilter(Action[R], reach=Reach.ANY_TENANT):
    """Selects failed and held emails. Every face has these fields; `dead_emails` in dead.sql applies them."""

    filters: ClassVar[tuple[str, ...]]
    error_type: str | None = field(one_of(Reason), "Only this error type, such as outcome_unknown.", default=None)
    provider: str | None = field(PROVIDER, "Only emails whose last attempt used this provider.", default=None)
    channel: str | None = field(FILTER_TEXT, "Only this channel: `email`, `sms` or `test`.", default=None)
    tenant_id: str | None = field(TENANT, "Only this tenant; with message keys: the tenant of the keys.", default=None)
    text: str | None = field(
        FILTER_TEXT, "Only emails whose last error contains this text; case does not matter.", default=None
    )
    tag: str | None = field(FILTER_TEXT, "Only emails with this tag whose content is not deleted yet.", default=None)
    metadata: str | None = field(
        METADATA, "Only emails with this metadata, such as order=4711, whose content is not deleted yet.", default=None
    )
    older_than_seconds: float | None = field(AGE, "Only emails enqueued longer ago than this.", default=None)
    newer_than_seconds: float | None = field(AGE, "Only emails enqueued more recently than this.", default=None)

    def selected(self, **more: Any) -> Selection:
        """What the filter selects, with more of its fields."""
        given = {name: value for name, value in self.values().items() if name in select().parameters}
        return select(**given | more)


FailureFilter.filters = tuple(name for name in FailureFilter.fields if name != "tenant_id")


class DeadFilter(FailureFilter[R]):
    """Selects failed emails, held emails, or both."""

    status: Status | None = field(one_of(Status, "failed", "held"), "Only this status.", default=None)
    discarded: bool = field(
        FLAG, "Only emails whose dead letter was discarded. Otherwise, such emails are left out.", default=False
    )

    filters: ClassVar[tuple[str, ...]] = (*FailureFilter.filters, "status", "discarded")


def select(*, email_ids: Iterable[UUID] | None = None, discarded: bool | None = False, **filters: Any) -> Selection:
    """The failed and held emails with these values of the fields of `DeadFilter`; see `Selection`."""
    unfiltered = dict.fromkeys((*DeadFilter.filters, "tenant_id"))
    assert filters.keys() <= unfiltered.keys(), filters
    ids = None if email_ids is None else list(email_ids)
    return Selection({**unfiltered, **filters, "discarded": discarded, "email_ids": ids})


class ListDead(DeadFilter[Any], Paged[DeadEmail], name="dlq list", http="GET /v1/dead-letters", query="list_dead"):
    """List failed and held emails, newest first."""

    key: ClassVar = {"email_id": UUID}
    limit: int = field(ROWS, "The most emails.", default=50)

    constants: ClassVar = {"email_ids": None}
    plural = "emails"
    nothing = "No failed or held email matches."
    examples = ("dlq list --error-type refused --newer-than 1d", 'dlq list --provider ses --text "not verified"')


class DiscardDead(
    DeadFilter[Any], Batch, name="dlq discard", http="POST /v1/dead-letters/discard", query="discard_dead"
):
    """Discard the dead letters of failed and held emails. Nothing is sent.

    Give the ids or message keys of the emails, select emails by a filter, or select all with --all. A monitor removes
    their dead letters from the DLQ, and `dlq list` no longer lists the emails. The emails stay failed or held and keep
    their content and history. `dispatcher show` still shows them, `dlq list --discarded` lists them, and `dlq replay
    ID` can still send an email again.

    A poison message (p-…) points to no email. If you discard a poison message, its bytes are deleted. To keep the
    bytes, first run `dispatcher show p-… --export FILE`.

    Exit codes: 0 done, or no email matches; 1 nothing was discarded; 2 confirmation needs a terminal or --yes; 3 only
    some were discarded.
    """

    count, find = "count_dead", "find_dead_ids"
    others = "not failed or held"
    statuses = DEAD
    on_one = (
        "Discards the email's dead letter: removes the email from the lists and counts of failures. The email keeps "
        "its status, and is not sent. Until its content is deleted, it can still be replayed or released."
    )
    done = "The email's dead letter is discarded."
    none_selected = "No failed or held email matches."
    verdicts = (
        Verdict("discarded", "its dead letter is discarded.", is_success=True),
        Verdict("already_discarded", "not changed: its dead letter was discarded before.", is_success=True),
        Verdict("not_dead", "not changed: the status is {status}, so it has no dead letter."),
    )
    examples = (
        'dlq discard --error-type rejected_recipient --older-than 1w --reason "typos, customers informed"',
        'dlq discard p-3fa9c1d2e0b4 --reason "a test message"',
    )


class ListReplays(
    Paged[Replay], name="dlq replays", http="GET /v1/replays", query="list_replays", reach=Reach.ANY_TENANT
):
    """List replays, newest first: state, progress, operator, reason.

    The state `interrupted` means that some emails are not replayed yet, but no process runs the replay: for example,
    because the process was killed, or because another transaction had locked the remaining emails. `dispatcher dlq
    replay --resume REPLAY` continues the replay.
    """

    key: ClassVar = {"id": int}
    tenant_id: str | None = field(TENANT, "Only replays whose filter names this tenant.", default=None)
    limit: int = field(ROWS, "The most replays.", default=20)

    constants: ClassVar = {"replay_id": None}
    plural = "replays"
    nothing = "There are no replays."
    examples = ("dlq replays", "dlq replays --json | jq '.replays[] | select(.state == \"interrupted\")'")


class Replayable(DeadFilter[R]):
    """What a replay can select."""

    email_ids: tuple[UUID, ...] | None = field(EMAIL_IDS, "Only these emails.", default=None)
    include_held: bool = field(
        FLAG,
        "Also replay selected emails that may have arrived: held emails, and emails with an attempt that got no "
        "answer. Otherwise, these emails are skipped, even if the filter selects held emails.",
        default=False,
        option="--held",
    )


class PreviewReplay(
    Replayable[Any], Listing[Forecast], name="dlq preview", http="POST /v1/replays/preview", query="preview_dead"
):
    """Count what a replay would do now. Changes nothing: a row per outcome, with the number of emails and the ids of
    the first of them."""

    plural = "outcomes"
    examples = ("dlq preview --error-type refused",)

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[Forecast]:
        from dispatcher.store.failures import preview_dead

        del parameters
        return await preview_dead(source, self.selected(), include_held=self.include_held, sample=SAMPLE)


class CreateReplay(Replayable[Any], Change[Replay], name="dlq replay", http="POST /v1/replays"):
    """Send failed emails again. Selects the emails now, then replays them at `per_second`. Skips emails that are `sent`
    by then. Replays emails that may have arrived only with `include_held`."""

    per_second: float = field(PER_SECOND, "Emails per second.", default=DEFAULT_PER_SECOND, option="--rate")
    force: bool = field(FLAG, OWN_RATE, default=False)

    needs_reason, has_dry_run = False, True
    is_background = True
    created = "/v1/replays/{id}"
    statuses = frozenset({Status.FAILED})
    on_one = "Sends the email again: it becomes pending, gets all its attempts again, and its dead letter is removed."
    done = PENDING_AGAIN
    examples = ('dlq replay --error-type refused --reason "The domain is verified now."',)

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[Replay]:
        """Stores the list of emails. Afterwards the command or the API runs the replay (`ops.replaying`)."""
        from dispatcher.ops.acts import Act
        from dispatcher.ops.replaying import create

        act, held = Act(parameters["actor"], parameters["reason"]), self.include_held
        selection, rate = self.selected(), self.per_second
        return [await create(source, selection, act, include_held=held, per_second=rate, force=self.force)]


class OneReplay(Action[R], reach=Reach.ANY_TENANT):
    """Is about one replay."""

    replay_id: int = field(REPLAY_ID, "The replay's id.")
    tenant_id: str | None = field(TENANT, "The tenant that the replay's filter names.", default=None)

    constants: ClassVar = {"after_id": None, "limit": 1}
    refusals = (Refusal("unknown", "not-found", "There is no replay {replay_id}.", "See `dispatcher dlq replays`."),)


class GetReplay(OneReplay[Replay], name="dlq get", http="GET /v1/replays/{replay_id}", query="list_replays"):
    """Get a replay's progress. `is_active` is true while a process runs the replay. If `state` is `interrupted`, resume
    it."""


class ChangeReplay(OneReplay[Any], Change[Replay]):
    """Changes one replay. Without effect if its state does not allow the change."""

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[Replay]:
        """The replay after the change."""
        from dispatcher.store.statements import fetch

        if not await fetch(source, "list_replays", parameters, into=Replay):
            return []
        await fetch(source, self.query, parameters)
        return await fetch(source, "list_replays", parameters, into=Replay)


class StopReplay(ChangeReplay, name="dlq stop", http="DELETE /v1/replays/{replay_id}", query="stop_replay"):
    """Stop a replay. It stops after its current email: emails that it has already made pending are still sent.

    A stopped replay can be resumed (`dlq replay --resume`).
    """

    tells_row = True
    done = "Emails that were already replayed are still sent."
    examples = ('dlq stop 7 --reason "the provider throttles us"',)


class ResumeReplay(ChangeReplay, name="dlq resume", http="POST /v1/replays/{replay_id}/resume", query="resume_replay"):
    """Resume a replay. Continues a stopped or interrupted replay with its next email. Has no effect on a running or
    done replay."""

    per_second: float | None = field(PER_SECOND, "The new rate.", default=None, option="--rate")
    force: bool = field(FLAG, OWN_RATE, default=False)

    needs_reason = False
    is_background = True
    examples = ('dlq resume 7 --reason "the process was restarted"',)


REPLAYS: Final = (ListReplays, PreviewReplay, CreateReplay, GetReplay, StopReplay, ResumeReplay)
"""A replay runs in the command, or in the background of the API, so each face has some of these, in its own way."""
ACTIONS = (ListDead, DiscardDead)
