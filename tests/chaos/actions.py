"""Lists the adversary's actions by name."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

from dispatcher.dev.smtp_behaviour import SmtpFault, Step
from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.chaos import message_actions, operator_actions, process_actions, server_actions
from tests.chaos.stage import Action, StormStage
from tests.chaos.subject import SERVERS

Behaviour = Mapping[str, object]


def misbehave(sendgrid: Behaviour, smtp: Behaviour) -> Action:
    """An action that sets the provider's behaviour for a while; see `dispatcher.dev.http_behaviour` and
    `smtp_behaviour`."""
    behaviours = {"sendgrid": sendgrid, "twilio": sendgrid, "smtp": smtp}

    def set_for_a_while(stage: StormStage, random: Random) -> bool:
        stage.behave(**behaviours[stage.provider_name])
        stage.later(random.uniform(0.5, 2.5), stage.behave)
        return True

    return set_for_a_while


def _http(act: str, times: int) -> Behaviour:
    return {"act": act, "times": times}


def _reply(status: int, times: int) -> Behaviour:
    return {"reply": {"status": status}, "times": times}


def _smtp(step: Step, text: str, **more: object) -> Behaviour:
    return {"script": {step.value: text}, **more}


MISBEHAVIOURS: Final[Mapping[str, tuple[Behaviour, Behaviour]]] = {
    "provider closes": (_http("close", 3), _smtp(Step.ANSWER, SmtpFault.CLOSE, times=3)),
    "provider resets": (_http("reset", 3), _smtp(Step.ANSWER, SmtpFault.RESET, times=3)),
    "provider forgets": (_http("forget", 3), _smtp(Step.END, SmtpFault.CLOSE, times=3)),
    "provider breaks off": (_http("half-head", 3), _smtp(Step.ANSWER, "no reply", times=3)),
    "provider hangs": (_http("hang", 2), _smtp(Step.ANSWER, SmtpFault.HANG, times=2)),
    "provider hangs up": (_http("last-answer", 20), _smtp(Step.MAIL, SmtpFault.CLOSE, times=20)),
    "provider 500": (_reply(500, 6), _smtp(Step.END, "451 4.3.0 later", times=6)),
    "provider 503": (_reply(503, 30), _smtp(Step.MAIL, "421 4.3.2 busy", times=30)),
    "provider 400": (_reply(400, 3), _smtp(Step.END, "554 5.6.0 no", times=3)),
    "provider 429": ({"throttle_seconds": 1.0}, _smtp(Step.MAIL, "450 4.7.28 unusual rate")),
    "provider is late": ({"latency_ms": 1000}, {"latency_ms": 1000}),
}
"""What the provider does for a while: SendGrid or Twilio, and SMTP."""

DECK: Final[Mapping[str, tuple[Action, int]]] = {
    "kill worker": (process_actions.kill_one(lambda stage: stage.find("worker")), 7),
    "kill relay": (process_actions.kill_one(lambda stage: stage.find("relay")), 6),
    "kill parent": (process_actions.kill_parent, 4),
    "kill host": (process_actions.kill_host, 2),
    "kill producer": (process_actions.kill_one(lambda stage: stage.producers.pids()), 4),
    "freeze worker": (process_actions.freeze_one("worker"), 2),
    "freeze relay": (process_actions.freeze_one("relay"), 1),
    "freeze host": (process_actions.freeze_host, 1),
    "cut network": (server_actions.cut_network(*SERVERS), 2),
    "cut network to database": (server_actions.cut_network(POSTGRES), 1),
    "cut network to broker": (server_actions.cut_network(RABBITMQ), 1),
    "black hole": (server_actions.black_hole(*SERVERS), 2),
    "black hole to database": (server_actions.black_hole(POSTGRES), 1),
    "black hole to broker": (server_actions.black_hole(RABBITMQ), 1),
    "hang backend": (server_actions.hang_backend, 2),
    "hang backend of dead": (server_actions.hang_backend_of_dead, 1),
    "delete ledger": (process_actions.delete_ledger, 2),
    "step clock": (server_actions.step_clock, 3),
    "end worker": (process_actions.end_worker, 1),
    "restart run": (process_actions.restart_run, 1),
    "reload run": (process_actions.reload_run, 1),
    "add worker": (process_actions.add_worker, 1),
    "cut connections": (server_actions.cut_connections, 2),
    "restart broker": (server_actions.restart_broker, 1),
    "alarm broker": (server_actions.alarm_broker, 1),
    "purge queue": (message_actions.purge_queue, 1),
    "cut sessions": (server_actions.cut_sessions, 2),
    "restart database": (server_actions.restart_database, 2),
    "inject duplicates": (message_actions.inject_duplicates, 2),
    "inject garbage": (message_actions.inject_garbage, 1),
    "damage rows": (message_actions.damage_rows, 2),
    "cancel": (operator_actions.cancel, 3),
    "reschedule": (operator_actions.reschedule, 2),
    "pause": (operator_actions.pause, 2),
    "release reported": (operator_actions.release_reported, 0),
    "kill api": (process_actions.kill_api, 0),
    **{name: (misbehave(sendgrid, smtp), 1) for name, (sendgrid, smtp) in MISBEHAVIOURS.items()},
}
"""Every action by name, with the number of its cards in the deck from which the adversary draws."""

EVENT_CARDS: Final[Mapping[str, int]] = {"release reported": 6, "kill api": 3}
"""The cards that a deck has in addition if the provider reports events."""

KILLS: Final = ("kill worker", "kill relay", "kill parent", "kill host", "kill producer", "kill api")

GENTLE: Final = (
    *("provider", "step clock", "inject", "purge queue", "alarm broker", "add worker", "release", "kill api"),
    *("cancel", "reschedule", "pause", "damage"),
)
"""The name prefixes of actions that do not prevent a worker from renewing its leases."""
