"""`dispatcher pause` and `dispatcher resume`: stop sending for a while, and continue."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC
from typing import TYPE_CHECKING, Final

import click

from dispatcher.cli.environment import load_settings
from dispatcher.cli.exits import Exit
from dispatcher.cli.filter_options import Age
from dispatcher.cli.options import audit_options, json_option, made_act
from dispatcher.cli.output import print_data, print_json, say
from dispatcher.cli.sessions import run_with_session
from dispatcher.cli.table import Table
from dispatcher.domain.controls import PauseScope

if TYPE_CHECKING:
    from dispatcher.config import Settings
    from dispatcher.domain.controls import Pause
    from dispatcher.ops.acts import Act

_LIST: Final = "list"
_NAME: Final = click.argument("name", required=False)


@click.command("pause")
@click.argument("scope", type=click.Choice([*(each.value for each in PauseScope), _LIST]))
@_NAME
@click.option(
    "--for",
    "seconds",
    type=Age(),
    metavar="TIME",
    help="How long the pause lasts, such as 30m, 2h or 3d.  [default: until `dispatcher resume`]",
)
@audit_options(
    is_required=False,
    reason="The reason, for the audit log: a few words, without addresses. Required, except for `list`.",
)
@json_option()
def command(scope: str, name: str | None, seconds: float | None, act: Act | None, as_json: bool) -> int:
    """Stop sending: everything, or one lane, tenant or provider. Or list what is paused.

    \b
    Examples:
      dispatcher pause provider sendgrid --for 2h --reason "planned maintenance"
      dispatcher pause tenant acme --reason "complaints: see ticket 4711"
      dispatcher pause lane bulk --reason "the legal department checks the sale"
      dispatcher pause all --for 30m --reason "database move"
      dispatcher pause list

    All hosts apply a pause within two seconds. Applications can still enqueue emails; these emails wait. Emails that
    are already being transmitted to a provider are finished as usual. A pause lasts until `dispatcher resume`, or for
    the time in --for, even if processes restart. To change the end or the reason of a pause, pause again.

    While a provider is paused, the other providers in DISPATCHER_PROVIDERS send the emails, as if the paused provider
    were unreachable. Emails that only the paused provider can send wait.

    `dispatcher status` shows the pause and its reason, and the audit log records them.
    """
    settings = load_settings("database_url")
    if scope == _LIST:
        if name or seconds or act:
            raise click.UsageError("`dispatcher pause list` takes no name, no --for and no --reason.")
        return _list(settings, as_json=as_json)
    if act is None:
        raise click.UsageError("Missing option '--reason'.")
    from dispatcher.ops import pausing

    found, target = PauseScope(scope), _target(PauseScope(scope), name, settings)
    if seconds is not None and not 0 < seconds <= pausing.MAX_SECONDS:
        raise click.BadParameter("must be more than 0 s and at most 366 days.", param_hint="'--for'")
    pause = run_with_session(
        "pause", lambda session: pausing.pause(session, found, target, act, seconds=seconds), settings
    )
    if as_json:
        print_json(asdict(pause))
    else:
        end = _time(pause) if pause.until else f"`dispatcher resume {scope}{f' {target}' if target else ''}`"
        say(f"Paused {pause.subject} until {end}. All hosts apply this within two seconds.")
    return Exit.DONE


@click.command("resume")
@click.argument("scope", type=click.Choice([each.value for each in PauseScope]))
@_NAME
@audit_options(is_required=False)
def resume(scope: str, name: str | None, act: Act | None) -> int:
    """End a pause: of everything, or of one lane, tenant or provider.

    \b
    Examples:
      dispatcher resume provider sendgrid
      dispatcher resume tenant acme --reason "the list is clean now"

    For a provider, also ends the wait that workers began themselves, because the provider throttled us, failed or
    refused all emails. Other pauses stay in force: after `dispatcher resume all`, a paused tenant is still paused.
    """
    from dispatcher.ops import pausing

    settings = load_settings("database_url")
    found, decided = PauseScope(scope), made_act(act, "dispatcher resume")
    target = _target(found, name, settings, is_new=False)
    pause = run_with_session("resume", lambda session: pausing.resume(session, found, target, decided), settings)
    say(f"Resumed {pause.subject}. All hosts apply this within two seconds.")
    return Exit.DONE


def _target(scope: PauseScope, name: str | None, settings: Settings, *, is_new: bool = True) -> str:
    """The checked name of the lane, tenant or provider; empty if the scope is `all`.

    Args:
        is_new: Whether the settings must contain the lane or provider. `resume` does not require this, so that it can
            end the pause of a lane or provider that was removed from the settings.

    Raises:
        UsageError: a name is missing, not allowed, or unknown.
    """
    if scope is PauseScope.ALL and name is not None:
        raise click.UsageError("The scope `all` takes no name.")
    if scope is PauseScope.ALL:
        return ""
    if not name:
        raise click.UsageError(f"Give the name of the {scope}.")
    if not is_new:
        return name
    from dispatcher.ops.pausing import check_target

    try:
        return check_target(scope, name, settings)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _list(settings: Settings, *, as_json: bool) -> int:
    from dispatcher.ops.pausing import list_pauses

    pauses = run_with_session("pause", list_pauses, settings)
    if as_json:
        print_json([asdict(pause) for pause in pauses])
        return Exit.DONE
    if not pauses:
        say("Nothing is paused.")
        return Exit.DONE
    shown = Table("paused", "until", "by", "reason")
    for pause in pauses:
        shown.add(pause.subject, _time(pause) if pause.until else "-", pause.actor, pause.reason)
    print_data("\n".join(shown.lines()))
    return Exit.DONE


def _time(pause: Pause) -> str:
    assert pause.until is not None
    return f"{pause.until.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
