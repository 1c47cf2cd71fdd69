"""Lists the adversary's actions by name."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

from dispatcher.dev.smtp_behaviour import SmtpFault, Step
from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.chaos.action import Action
from tests.chaos.event_actions import kill_api, release_reported
from tests.chaos.message_actions import (
    inject_duplicates,
    inject_garbage,
    purge_queue,
)
from tests.chaos.network import SERVERS
from tests.chaos.process_actions import (
    add_worker,
    delete_ledger,
    end_worker,
    freeze_host,
    freeze_relay,
    freeze_worker,
    kill_host,
    kill_parent,
    kill_producer,
    kill_relay,
    kill_worker,
    reload_run,
    restart_run,
)
from tests.chaos.row_actions import damage_rows
from tests.chaos.server_actions import (
    alarm_broker,
    black_hole,
    cut_connections,
    cut_network,
    cut_sessions,
    hang_backend,
    hang_backend_of_dead,
    restart_broker,
    restart_database,
    step_clock,
)
from tests.chaos.stage import StormStage
from tests.chaos.timing_actions import cancel, pause, reschedule


def provider(*, sendgrid: Mapping[str, object], smtp: Mapping[str, object]) -> Action:
    """An action that sets the provider's behaviour for a while; see `dispatcher.dev.http_behaviour` and
    `smtp_behaviour`."""
    behaviours = {"sendgrid": sendgrid, "twilio": sendgrid, "smtp": smtp}

    def misbehave(stage: StormStage, random: Random) -> bool:
        stage.behave(**behaviours[stage.provider_name])
        stage.later(random.uniform(0.5, 2.5), stage.behave)
        return True

    return misbehave


def _smtp(step: Step, text: str, **more: object) -> Mapping[str, object]:
    return {"script": {step.value: text}, **more}


DECK: Final[Mapping[str, tuple[Action, int]]] = {
    "kill worker": (kill_worker, 7),
    "kill relay": (kill_relay, 6),
    "kill parent": (kill_parent, 4),
    "kill host": (kill_host, 2),
    "kill producer": (kill_producer, 4),
    "freeze worker": (freeze_worker, 2),
    "freeze relay": (freeze_relay, 1),
    "freeze host": (freeze_host, 1),
    "cut network": (cut_network(*SERVERS), 2),
    "cut network to database": (cut_network(POSTGRES), 1),
    "cut network to broker": (cut_network(RABBITMQ), 1),
    "black hole": (black_hole(*SERVERS), 2),
    "black hole to database": (black_hole(POSTGRES), 1),
    "black hole to broker": (black_hole(RABBITMQ), 1),
    "hang backend": (hang_backend, 2),
    "hang backend of dead": (hang_backend_of_dead, 1),
    "delete ledger": (delete_ledger, 2),
    "step clock": (step_clock, 3),
    "end worker": (end_worker, 1),
    "restart run": (restart_run, 1),
    "reload run": (reload_run, 1),
    "add worker": (add_worker, 1),
    "cut connections": (cut_connections, 2),
    "restart broker": (restart_broker, 1),
    "alarm broker": (alarm_broker, 1),
    "purge queue": (purge_queue, 1),
    "cut sessions": (cut_sessions, 2),
    "restart database": (restart_database, 2),
    "inject duplicates": (inject_duplicates, 2),
    "inject garbage": (inject_garbage, 1),
    "damage rows": (damage_rows, 2),
    "cancel": (cancel, 3),
    "reschedule": (reschedule, 2),
    "pause": (pause, 2),
    "release reported": (release_reported, 0),
    "kill api": (kill_api, 0),
    "provider closes": (
        provider(sendgrid={"act": "close", "times": 3}, smtp=_smtp(Step.ANSWER, SmtpFault.CLOSE, times=3)),
        1,
    ),
    "provider resets": (
        provider(sendgrid={"act": "reset", "times": 3}, smtp=_smtp(Step.ANSWER, SmtpFault.RESET, times=3)),
        1,
    ),
    "provider forgets": (
        provider(sendgrid={"act": "forget", "times": 3}, smtp=_smtp(Step.END, SmtpFault.CLOSE, times=3)),
        1,
    ),
    "provider breaks off": (
        provider(sendgrid={"act": "half-head", "times": 3}, smtp=_smtp(Step.ANSWER, "no reply", times=3)),
        1,
    ),
    "provider hangs": (
        provider(sendgrid={"act": "hang", "times": 2}, smtp=_smtp(Step.ANSWER, SmtpFault.HANG, times=2)),
        1,
    ),
    "provider hangs up": (
        provider(sendgrid={"act": "last-answer", "times": 20}, smtp=_smtp(Step.MAIL, SmtpFault.CLOSE, times=20)),
        1,
    ),
    "provider 500": (
        provider(sendgrid={"reply": {"status": 500}, "times": 6}, smtp=_smtp(Step.END, "451 4.3.0 later", times=6)),
        1,
    ),
    "provider 503": (
        provider(sendgrid={"reply": {"status": 503}, "times": 30}, smtp=_smtp(Step.MAIL, "421 4.3.2 busy", times=30)),
        1,
    ),
    "provider 400": (
        provider(sendgrid={"reply": {"status": 400}, "times": 3}, smtp=_smtp(Step.END, "554 5.6.0 no", times=3)),
        1,
    ),
    "provider 429": (provider(sendgrid={"throttle_seconds": 1.0}, smtp=_smtp(Step.MAIL, "450 4.7.28 unusual rate")), 1),
    "provider is late": (provider(sendgrid={"latency_ms": 1000}, smtp={"latency_ms": 1000}), 1),
}
"""Every action by name, with the number of its cards in the deck from which the adversary draws."""

EVENT_CARDS: Final[Mapping[str, int]] = {"release reported": 6, "kill api": 3}
"""The cards that a deck has in addition if the provider reports events."""

KILLS: Final = ("kill worker", "kill relay", "kill parent", "kill host", "kill producer", "kill api")
"""Actions that send SIGKILL to one of our processes."""

GENTLE: Final = (
    *("provider", "step clock", "inject", "purge queue", "alarm broker", "add worker", "release", "kill api"),
    *("cancel", "reschedule", "pause", "damage"),
)
"""The name prefixes of actions that do not prevent a worker from renewing its leases."""
