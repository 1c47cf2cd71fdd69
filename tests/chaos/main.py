"""`./run chaos`: a storm on private servers, and its verdict."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from dispatcher.broker.topology import Topology
from dispatcher.cli.exits import Exit
from dispatcher.cli.output import prepare_streams, print_data, say
from dispatcher.cli.table import Table
from dispatcher.config import MAX_BUNDLE_EMAILS
from dispatcher.dev.servers import AMQP_URL, DATABASE_URL, MANAGEMENT_URL, private_servers
from dispatcher.errors import DispatcherError
from dispatcher.telemetry.log import configure
from tests.acceptance.outages import POSTGRES, RABBITMQ, StoppableServers
from tests.chaos.actions import KILLS
from tests.chaos.cluster_storm import DECK, DECK_OF_HOSTS, PAUSE_SECONDS, cluster_ground, measured, print_standstills
from tests.chaos.mutants import MUTANTS
from tests.chaos.plan import Ground, HarnessFailed, StormPlan
from tests.chaos.storm import CHOSEN, StormOutcome, play

PROGRAM: Final = "./run chaos"
NOT_JUDGED: Final = 75


@click.command(PROGRAM, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--minutes", type=click.FloatRange(0.05, 600), default=1.0, show_default=True, help="The duration.")
@click.option("--seed", type=click.IntRange(min=0), help="The same seed gives the same actions.  [default: random]")
@click.option("--policy", type=click.Choice(["hold", "resend"]), default="hold", show_default=True, help=(
    "What to do with an email if the outcome of an attempt is unknown."
))  # fmt: skip
@click.option("--rate", type=click.FloatRange(1, 5000), default=100.0, show_default=True, help="Emails per second.")
@click.option("--hosts", type=click.IntRange(1, 8), help=(
    "Number of hosts. The network of all hosts but one can fail.  [default: 2; with --cluster 1, no network faults]"
))  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Workers per host.")
@click.option("--provider", type=click.Choice(["sendgrid", "smtp"]), default="sendgrid", show_default=True, help=(
    "The provider that the double imitates."
))  # fmt: skip
@click.option("--channel", type=click.Choice(["email", "sms", "both"]), default="email", show_default=True, help=(
    "What is enqueued. SMS go to a local Twilio."
))  # fmt: skip
@click.option("--bundle", type=click.IntRange(1, MAX_BUNDLE_EMAILS), default=16, show_default=True, help=(
    "The most emails per message (DISPATCHER_BUNDLE_EMAILS)."
))  # fmt: skip
@click.option("--events", is_flag=True, help=(
    "The provider reports events about accepted emails: late, up to 46 times, in any order, and about some never."
))  # fmt: skip
@click.option("--set", "settings", metavar="NAME=VALUE", multiple=True, help=(
    "A setting of every host, such as DISPATCHER_REDELIVER_FOR=1m. Repeatable."
))  # fmt: skip
@click.option("--recipients-per-transaction", type=click.IntRange(1, 100), metavar="N", help=(
    "The SMTP double takes N recipients in one transaction, and answers 452 4.5.3 to the others. Emails have up to "
    "2 N + 1 recipients, and the oracle checks each of them.  [default: no limit, one recipient]"
))  # fmt: skip
@click.option("--cluster", is_flag=True, help=(
    "Use three RabbitMQ nodes and a PostgreSQL primary with a synchronous standby, and kill and freeze them."
))  # fmt: skip
@click.option(
    "--mutant", type=click.Choice(list(MUTANTS)), help="Switch off a safety mechanism; exit code 1 is expected."
)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help=(
    "Keep logs, ledgers and the adversary's diary in this folder.  [default: deleted if the promise was kept]"
))  # fmt: skip
def command(
    minutes: float,
    seed: int | None,
    hosts: int | None,
    settings: tuple[str, ...],
    recipients_per_transaction: int | None,
    cluster: bool,
    mutant: str | None,
    folder: Path | None,
    **given: Any,
) -> int:
    """Tests the delivery promise: dispatches under load while an adversary causes faults, then checks every email.

    docs/proof.md lists the faults. All servers are private, and no email leaves the machine. At the end every fault is
    healed and all work completes. Then an oracle compares the producers' answers, the database, the dead letters and
    the provider's ledger.

    \b
    Examples:
      ./run chaos --minutes 5 --seed 1
      ./run chaos --provider smtp --recipients-per-transaction 2 --set DISPATCHER_REDELIVER_FOR=1m
      ./run chaos --cluster --minutes 5 --rate 50
      ./run chaos --mutant ledger-off; test $? = 1

    With --cluster, the command prints the standstill after each fault: the longest time without an acceptance at the
    provider while emails are due.

    Exit codes: 0 the promise was kept; 1 the promise was broken, a standstill was longer than 15 s, or the dispatcher
    did not start; 75 no verdict, because the test harness failed: try again.
    """
    if given["provider"] != "smtp" and recipients_per_transaction:
        raise click.UsageError("--recipients-per-transaction needs --provider smtp.")
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    plan = StormPlan(
        seconds=minutes * 60,
        seed=seed,
        hosts=hosts or (1 if cluster else 2),
        settings=_settings(settings),
        recipients_per_transaction=recipients_per_transaction or 0,
        **given,
    )
    if cluster:
        plan = replace(plan, deck=DECK if plan.hosts == 1 else DECK_OF_HOSTS, pause_seconds=PAUSE_SECONDS)
    if mutant:
        plan = MUTANTS[mutant].apply_to(plan)
    say(
        f"chaos: seed {seed}, {minutes:g} min, policy {plan.policy}, {plan.provider}, {plan.rate:g} emails/s, "
        f"{plan.hosts} hosts with {plan.workers} workers each, bundles of {plan.bundle}"
        f"{', with events' if plan.events else ''}"
    )
    # Also restore SIGINT, because a shell that starts us in the background makes us ignore it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    tell = _teller()
    with _place(folder) as place:
        try:
            with cluster_ground(plan, place, tell) if cluster else _ground(place) as ground:
                outcome = play(plan, ground, place, tell)
        except HarnessFailed as failure:
            if not folder:
                _keep(place, "the storm has no verdict")
            print_data(f"No verdict: the harness failed, because {failure}")
            return NOT_JUDGED
        found = measured(ground.outages, place)
        is_good = outcome.verdict.is_good and not any(each.is_too_long for each in found)
        if not (folder or mutant or is_good):
            _keep(place, "the promise was broken")
    print_outcome(plan, outcome)
    print_standstills(found)
    return Exit.DONE if is_good else Exit.FAILED


EXAMPLES: Final = 3
JUDGED: Final = (
    *("lost", "duplicates", "sent_after_cancelled", "too_late_wrongly", "uncertain"),
    *("held_on_wire", "held_at_edge", "held_without_ledger", "held_unexplained"),
)


def print_outcome(plan: StormPlan, outcome: StormOutcome) -> None:
    verdict, actions = outcome.verdict, outcome.actions
    fields: dict[str, Any] = {
        **{name: getattr(plan, name) for name in ("seed", "policy", "provider", "channel", "hosts", "bundle")},
        **plan.settings,
        **{domain: " ".join(options) for domain, options in plan.ceilings.items()},
        **({"recipients_per_transaction": n} if (n := plan.recipients_per_transaction) else {}),
        "minutes": round(plan.seconds / 60, 2),
        "enqueued": verdict.enqueued,
        **{status: verdict.counts.get(status, 0) for status in ("sent", "failed", "held", "cancelled")},
        **{name: getattr(verdict, name) for name in JUDGED},
        **({"held_accepted": verdict.held_accepted, "settled": verdict.settled} if plan.events else {}),
        "kills": sum(actions.get(name, 0) for name in KILLS),
        "seconds": round(outcome.seconds, 1),
    }
    table = Table("name", "value")
    for name, value in fields.items():
        table.add(name, value)
    table.show()
    print_data("actions: " + ", ".join(f"{name} {times}" for name, times in sorted(actions.items())))
    for name, found in verdict.violations.items():
        print_data(f"WRONG: {name}: {len(found)}, such as {'; '.join(found[:EXAMPLES])}")
    print_data("The promise was kept." if verdict.is_good else "The promise was broken.")


def _settings(given: Sequence[str]) -> dict[str, str]:
    settings = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("DISPATCHER_"):
            raise click.UsageError(f"--set {text}: write DISPATCHER_NAME=VALUE.")
        if name.removeprefix("DISPATCHER_") in CHOSEN:
            raise click.UsageError(f"--set {text}: the storm itself chooses {name}.")
        settings[name] = value
    return settings


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """A folder for all files of the storm. The folder is deleted afterwards, unless `folder` is given or the block
    moved the files."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix="storm-", dir=folder)).absolute()
        return
    # The path is short, because the folder contains Unix sockets and Erlang's cookie files, whose paths must be short.
    place = Path(tempfile.mkdtemp(prefix="dispatcher-chaos-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _keep(place: Path, why: str) -> None:
    kept = place.with_name(f"{place.name}-bad")
    shutil.rmtree(place / "servers", ignore_errors=True)
    shutil.copytree(place, kept)
    say(f"chaos: {why}; logs, ledgers and the adversary's diary are in {kept}")


@contextmanager
def _ground(place: Path) -> Iterator[Ground]:
    for variable in (DATABASE_URL, AMQP_URL, MANAGEMENT_URL):
        os.environ.pop(variable, None)
    with private_servers(place / "servers", progress=say) as servers:
        yield Ground(
            stoppable=StoppableServers(servers),
            removable_names=(POSTGRES, RABBITMQ),
            database_url=servers.database_url,
            topology=Topology("chaos", "chaos.send", "chaos.dlq"),
            shares_broker=False,
        )


def _teller() -> Callable[[str], None]:
    began_at = time.monotonic()
    return lambda words: say(f"{time.monotonic() - began_at:6.1f} s  {words}")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    prepare_streams()
    configure("error", "json", sys.stderr)  # the reporter uses the product's intake, which logs
    try:
        return int(command.main(prog_name=PROGRAM, standalone_mode=False) or 0)
    except click.Abort:
        say("chaos: stopped without a verdict")
        return Exit.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except DispatcherError as error:
        say(f"chaos: {error.message}")
        return Exit.FAILED


if __name__ == "__main__":
    sys.exit(main())
