"""Stop the sending of everything, or of one lane, tenant or provider; and continue.

All hosts apply a pause within two seconds. Applications can still enqueue emails; these emails wait. Emails that are
already being transmitted to a provider are finished as usual. A pause lasts until `dispatcher resume`, or for the time
in --for, even if processes restart. To change the end or the reason of a pause, pause again. Each pause ends alone:
after `dispatcher resume all`, a paused tenant is still paused. `dispatcher status` shows the pauses and their reasons,
and the audit log records them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from dispatcher.actions.action import Action, Change, Listing, Mistake, Mistakes, Reach, Refusal, field
from dispatcher.actions.lanes import LANE, MAX_SECONDS, check_lane
from dispatcher.domain.controls import ListedPause, Pause, PauseScope, seen_by
from dispatcher.domain.kinds import TENANT, seconds, text

PROVIDER: Final = text(100, metavar="PROVIDER")
_LIST: Final = "`dispatcher pause list` lists what is paused."


class _AboutPauses(Action[Any]):
    @classmethod
    def noun(cls) -> str:
        return "pauses"

    @classmethod
    def rows(cls) -> dict[str, type[Any]]:
        """The statement's rows, without the effect."""
        return {cls.query: Pause}

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[ListedPause]:
        """The pauses with their effects. Tenants see who paused them without the host."""
        from dispatcher.store.controls import find_paused_emails
        from dispatcher.store.statements import fetch

        found = await fetch(source, self.query, parameters, into=ListedPause)
        pauses = seen_by(found, self.values().get("tenant_id"))
        effects = await find_paused_emails(source, [each.scope for each in pauses], [each.name for each in pauses])
        return [
            replace(each, waiting=waiting, has_emails=has_emails)
            for each, (waiting, has_emails) in zip(pauses, effects, strict=True)
        ]


class ListPauses(
    Listing[ListedPause],
    _AboutPauses,
    name="pause list",
    http="GET /v1/pauses",
    query="list_pauses",
    reach=Reach.ANY_TENANT,
):
    """List what is paused. For a tenant: only the pause of this tenant, if there is one."""

    tenant_id: str | None = field(TENANT, "Only the pause of this tenant.", default=None)

    constants: ClassVar = {"email_id": None}
    nothing = "Nothing is paused."
    missing: ClassVar = {"until": "an operator resumes"}
    examples = ("pause list",)


class _Named(Change[ListedPause], _AboutPauses):
    """Begins or ends the pause of everything, or of what the command's argument names."""

    def check(self, settings: Any) -> None:
        del settings
        if self.values().get("tenant_id", "") is None:
            raise Mistakes([Mistake("tenant_id", "is required")])

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        del source, settings
        return {"name": "".join(str(getattr(self, name)) for name in self.argument_names())}


class _Begin(_Named):
    for_seconds: float | None = field(
        seconds(1, MAX_SECONDS),
        "How long the pause lasts, such as 30m, 2h or 3d.  [default: until an operator resumes]",
        default=None,
        option="--for",
    )

    tells_row = True
    done = "All hosts apply the change within two seconds."


def _not_paused(words: str) -> tuple[Refusal]:
    return (Refusal("not-paused", "not-found", words, _LIST),)


class _End(_Named):
    needs_reason = False
    post_verb = "resume"
    done = "Resumed. All hosts apply the change within two seconds."


class PauseAll(_Begin, name="pause all", http="PUT /v1/pauses/all", query="begin_pause"):
    """Stop sending everything. Applications can still enqueue emails: these emails wait."""

    constants: ClassVar = {"scope": PauseScope.ALL}
    examples = ('pause all --reason "database move"', 'pause all --for 30m --reason "database move"')


class PauseLane(_Begin, name="pause lane", http="PUT /v1/pauses/lanes/{lane}", query="begin_pause"):
    """Stop sending the emails of a lane. They wait, also if they are enqueued during the pause."""

    lane: str = field(LANE, "The lane.")

    constants: ClassVar = {"scope": PauseScope.LANE}
    examples = ('pause lane bulk --reason "the legal department checks the sale"',)

    def check(self, settings: Any) -> None:
        check_lane(self.lane, settings)


class PauseTenant(_Begin, name="pause tenant", http="POST /v1/pauses", query="begin_pause", reach=Reach.ANY_TENANT):
    """Stop sending the emails of a tenant. They wait, also if they are enqueued during the pause."""

    tenant_id: str | None = field(TENANT, "The tenant.", default=None)

    arguments = ("tenant_id",)
    constants: ClassVar = {"scope": PauseScope.TENANT}
    examples = ('pause tenant acme --reason "complaints: see ticket 4711"',)


class PauseProvider(_Begin, name="pause provider", http="PUT /v1/pauses/providers/{provider}", query="begin_pause"):
    """Stop sending through a provider. The other providers in DISPATCHER_PROVIDERS then send the emails, as if the
    paused provider were unreachable. Emails that only the paused provider can send wait.
    """

    provider: str = field(PROVIDER, "The provider.")

    constants: ClassVar = {"scope": PauseScope.PROVIDER}
    examples = (
        'pause provider sendgrid --reason "its account is suspended"',
        'pause provider sendgrid --for 2h --reason "planned maintenance"',
    )

    def check(self, settings: Any) -> None:
        if settings.providers and self.provider not in settings.providers:
            known = ", ".join(settings.providers)
            raise Mistakes([Mistake("provider", f"must be one of DISPATCHER_PROVIDERS: {known}")])


class ResumeAll(_End, name="resume all", http="DELETE /v1/pauses/all", query="end_pause"):
    """End the pause of everything. Other pauses stay in force."""

    constants: ClassVar = {"scope": PauseScope.ALL}
    refusals = _not_paused("Sending as a whole is not paused.")
    examples = ("resume all",)


class ResumeLane(_End, name="resume lane", http="DELETE /v1/pauses/lanes/{lane}", query="end_pause"):
    """End the pause of a lane. Other pauses stay in force."""

    lane: str = field(LANE, "The lane. DISPATCHER_LANES need not contain it any more.")

    constants: ClassVar = {"scope": PauseScope.LANE}
    refusals = _not_paused("The lane {lane} is not paused.")
    examples = ("resume lane bulk",)


class ResumeTenant(_End, name="resume tenant", http="DELETE /v1/pauses", query="end_pause", reach=Reach.ANY_TENANT):
    """End the pause of a tenant. Other pauses stay in force."""

    tenant_id: str | None = field(TENANT, "The tenant.", default=None)

    arguments = ("tenant_id",)
    constants: ClassVar = {"scope": PauseScope.TENANT}
    refusals = _not_paused("The tenant {tenant_id} is not paused.")
    examples = ('resume tenant acme --reason "the list is clean now"',)


class ResumeProvider(_End, name="resume provider", http="DELETE /v1/pauses/providers/{provider}", query="end_pause"):
    """End the pause of a provider. This also ends the wait that workers began themselves, because the provider
    throttled us, failed or refused all emails. Other pauses stay in force.
    """

    provider: str = field(PROVIDER, "The provider. DISPATCHER_PROVIDERS need not contain it any more.")

    constants: ClassVar = {"scope": PauseScope.PROVIDER}
    refusals = _not_paused("The provider {provider} is not paused, and no worker waits for it.")
    examples = ("resume provider sendgrid",)


ACTIONS = (
    ListPauses,
    PauseAll,
    PauseLane,
    PauseTenant,
    PauseProvider,
    ResumeAll,
    ResumeLane,
    ResumeTenant,
    ResumeProvider,
)
