"""Wrong usage is refused with exit code 2, before any connection, with words that name the option and what fits.

`tests/test_actions.py` gives each field of each action a wrong value, and tests/domain/test_kinds.py has the values."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.commandline import CommandLine

ID = "00000000-0000-7000-8000-000000000000"
PRIVATE = "DISPATCHER_WEBHOOKS_ALLOW_PRIVATE"
LANES = "it must be one of DISPATCHER_LANES: urgent, normal, bulk"
ONE_OF_TWO = "'LANE': it is required, or another one of: lane, sender"
NO_SELECTION = "No emails are selected."


WRONG: dict[str, str] = {
    "lanes set slow --weight 1": f"'LANE': {LANES}",
    "lanes set bulk --from nothing": "'--from': it must be an address (otp@example.com) or a domain",
    "lanes unset": ONE_OF_TWO,
    "lanes unset bulk --from a@example.com": ONE_OF_TWO,
    "domains set example.org": "needs at least one of: --per-second, --concurrent",
    "domains set 'exa mple.org' --concurrent 1": "Invalid value for 'DOMAIN'",
    "domains set ann@example.org --concurrent 1": "contains an @; write only the part after the @",
    "domains set localhost --concurrent 1": "has no dot",
    "pause tenant acme": "--reason",
    "pause all acme --reason x": "unexpected extra argument",
    "pause lane slow --reason x": LANES,
    "pause provider pigeon --reason x": "it must be one of DISPATCHER_PROVIDERS: smtp",
    "keys create --name shop": "needs --from-domain, --from-address or --from-anywhere",
    "keys create --name shop --from-anywhere --from-domain example.com": "--from-anywhere",
    "keys create --name shop --all-tenants --scope read --allow-lane nosuch": f"'--allow-lane': {LANES}",
    "keys create --name s --all-tenants --scope read --tenant s": "'--all-tenants': it cannot be combined with",
    "webhooks add https://shop.example.com/": "either --tenant or --all-tenants",
    "webhooks add https://shop.example.com/ --tenant shop --events email.opened": "email.sent",
    "webhooks add https://127.0.0.1/hooks --all-tenants": f"{PRIVATE}=on allows other",
    "webhooks add 'https://[fd00::1]:8443/hooks' --all-tenants": f"{PRIVATE}=on allows other",
    "webhooks add https://ann:secret@example.com/ --all-tenants": "no user, password",
    "webhooks replay 1 --since yesterday": "'--since': it must be an age such as 90s, 2h or 3d, or a time such as",
    "suppressions add d@example.org --days 3 --expires-at 2036-01-01T00:00:00Z --reason x --dry-run": "--days",
    "held confirm --reason x": NO_SELECTION,
    "held confirm order-17": "--reason is missing",
    "held confirm order-17 --provider ses --reason x": "not both",
    "held confirm --status failed --reason x": "--status",
    "held confirm --text '' --yes --reason x": "--text",
    "held confirm --tenant ' ' --yes --reason x": "--tenant",
    "cancel --status sent --reason x": "--status",
    "cancel --lane ' ' --reason x": "--lane",
    "reschedule order-17 --now --send-in 1h --reason x": "another one of: send_at, send_in_seconds, now",
    "reschedule order-17 --send-at 2026-12-24T18:00:00 --reason x": "--send-at",
    "dlq list --poison --limit many": "--limit",
    "dlq replay --reason x": "--all",
    "dlq replay --all": "--reason",
    f"dlq replay {ID} --provider ses --reason x": "not both",
    "dlq replay --older-than soon --reason x": "--older-than",
    "dlq reconcile --fix": "--reason",
    "find --to secret": "--to",
    "find --domain secret@example.org": "--domain",
    "find --from secret@": "--from",
    "forget 'not an address' --reason x --yes": "ADDRESS",
    "forget +1 --reason x --yes": "The number must be a phone number",
    "status --history 0s": "--history",
    "status --history 7d --watch": "--watch",
    "doctro": "Did you mean 'doctor'?",
}


@pytest.mark.parametrize(("line", "words"), WRONG.items(), ids=list(WRONG))
def test_wrong_usage_is_refused(bare: CommandLine, line: str, words: str) -> None:
    away = bare.having(DISPATCHER_DATABASE_URL="postgresql://u@127.0.0.1:1/x", DISPATCHER_PROVIDERS="smtp")
    away = away.having(DISPATCHER_AMQP_URL="amqp://u@127.0.0.1:1/")

    ended = away(*shlex.split(line))

    assert (ended.code, ended.stdout) == (2, ""), ended
    assert words in " ".join(ended.stderr.split())
    assert "secret" not in ended.stderr
