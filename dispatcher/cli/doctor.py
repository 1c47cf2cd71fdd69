"""`dispatcher doctor`: checks everything that sending depends on, and says how to fix each fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

import click

from dispatcher.cli import checks
from dispatcher.cli.checks import CheckState, Finding
from dispatcher.cli.env_file import current_env_file
from dispatcher.cli.environment import API_NEEDS, RUN_NEEDS, examine_settings, warnings
from dispatcher.cli.exits import Exit
from dispatcher.cli.options import json_option
from dispatcher.cli.output import print_json
from dispatcher.cli.table import Styled, Table
from dispatcher.config import suspicious_settings
from dispatcher.domain.text import printable_lines

_MARKS: Final = {CheckState.OK: ("✓", "green"), CheckState.WARNING: ("!", "yellow"), CheckState.FAILED: ("✗", "red")}


@click.command("doctor")
@click.option(
    "--api", "for_api", is_flag=True, help="Check only what `dispatcher api` needs: no run directory, no providers."
)
@json_option("Print one line of JSON: the result, and every finding.")
def command(*, for_api: bool, as_json: bool) -> int:
    """Check everything that sending depends on, and say how to fix each fault. The command sends nothing.

    \b
    Examples:
      dispatcher doctor
      dispatcher doctor --api --env-file /etc/email-dispatcher/dispatcher-api.env
      dispatcher doctor --json | jq '.findings[] | select(.state != "ok")'

    \b
    Checks:
      settings     invalid settings, and who may read the env file
      recipients   whether this host sends to everyone (DISPATCHER_ALLOW_RECIPIENTS)
      process      Python's version, the open-file limit, the run directory
      PostgreSQL   version, fsync and synchronous_commit, number of connections, tables,
                   partitions, whether connected hosts share a name, whether a connection
                   keeps its session (some poolers prevent this), whether a small
                   transaction commits in time (this test stores no row), whether
                   applications have rights that only earlier releases need
      RabbitMQ     exchange and queues; if the management API is configured, also bindings,
                   policies, alarms, quorum and consumer timeout
      events       the configured ways in which providers report bounces, complaints and
                   deliveries; whether this user may read and change the Maildir of bounces
      providers    whether each provider accepts our credentials, and whether workers use it;
                   whether pending emails will fail because no provider can send them, or
                   because a header or a phone number is not allowed
      senders      by DNS, for DISPATCHER_SENDER_DOMAINS and the domains of API keys: SPF, DKIM,
                   DMARC and alignment, MX of the return path, each with the record to publish;
                   needs the extra dns (dnspython)

    The command creates missing folders. It changes nothing else.

    Exit codes: 0 no check failed (there may be warnings), 1 a check failed.
    """
    findings = list(_findings(for_api=for_api))
    is_ok = all(finding.state is not CheckState.FAILED for finding in findings)
    if as_json:
        print_json({"ok": is_ok, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    return Exit.DONE if is_ok else Exit.FAILED


def _findings(*, for_api: bool) -> Iterator[Finding]:
    settings, _, mistakes = examine_settings(*(API_NEEDS if for_api else RUN_NEEDS))
    for mistake in mistakes:
        yield Finding("settings", CheckState.FAILED, mistake)
    for warning in warnings():
        words = warning.removeprefix("warning: ")
        yield Finding("settings", CheckState.WARNING, words, "Correct or remove the variable.")
    for words in suspicious_settings(settings):
        yield Finding("settings", CheckState.WARNING, words)
    if not mistakes:
        yield checks.passed("settings", "valid; `dispatcher config` shows them")
    if file := current_env_file():
        yield checks.check_env_file(file)
    yield from checks.check_process(settings)
    if not for_api:
        yield from checks.check_recipients(settings)
        yield from checks.check_run_dir(settings)
    if settings.database_url:
        yield from checks.check_postgresql(settings)
    if settings.amqp_url:
        yield from checks.check_rabbitmq(settings)
    yield from checks.check_packages()
    yield from checks.check_capabilities(settings)
    yield from checks.check_event_sources(settings)
    if not for_api:
        yield from checks.check_providers(settings)
        yield from checks.check_senders(settings)


def _show(findings: list[Finding]) -> None:
    table = Table()
    for finding in findings:
        first, *rest = printable_lines(finding.detail).splitlines()
        table.add(Styled(*_MARKS[finding.state]), finding.subject, first)
        for line in rest:
            table.add("", "", line)
        for line in f"→ {printable_lines(finding.remedy)}".splitlines() if finding.remedy else ():
            table.add("", "", Styled(line, "bold"))
    table.show()
