"""The plan of a storm, the servers that it uses, and the exception for failures of the harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dispatcher.broker.topology import Topology
from tests.acceptance.outages import POSTGRES, RABBITMQ, StoppableServers
from tests.chaos.outages import Outages
from tests.chaos.subject import COMMAND


class HarnessFailed(Exception):
    """A part of the harness failed, so the storm has no verdict. The text gives the part and the reason."""


@dataclass(frozen=True, slots=True)
class StormPlan:
    """The settings of a storm.

    Attributes:
        hosts: The number of hosts. Every host except the first reaches the servers through proxies, unless the servers
            are a cluster.
        channel: What is enqueued: `email`, `sms` (by Twilio), or `both` in turn.
        connections: The maximum number of concurrent requests per worker; the worker's other leased emails wait.
        events: Whether the provider's double reports events about the emails that it has accepted.
        settings: Further settings of each host, as environment variables. They replace the storm's own.
        ceilings: The ceilings of recipient domains: by domain, the options of `dispatcher domains set`.
        recipients_per_transaction: The most recipients that the SMTP double takes in one transaction. Emails then have
            up to twice as many recipients and one more. 0 for no limit, and one recipient per email.
        patience_seconds: How much longer the adversary waits if no email was accepted since its last action. On a busy
            machine, processes take seconds to start, and the adversary would otherwise hit only idle processes.
        deck: The count of each action in the deck; actions that the servers do not allow are never drawn.
        rest_seconds: After the storm, give up if no email makes progress for this long.
    """

    seconds: float
    seed: int
    policy: str = "hold"
    rate: float = 100.0
    hosts: int = 2
    workers: int = 2
    provider: str = "sendgrid"
    channel: str = "email"
    pause_seconds: tuple[float, float] = (0.1, 1.2)
    patience_seconds: float = 3.0
    lease_seconds: float = 3.0
    latency_ms: int = 30
    connections: int = 12
    bundle: int = 16
    events: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    ceilings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    recipients_per_transaction: int = 0
    deck: Mapping[str, int] | None = None
    command: Sequence[str] = COMMAND
    rest_seconds: float = 120.0

    @property
    def recipients(self) -> int:
        return 2 * self.recipients_per_transaction + 1


@dataclass(frozen=True, slots=True)
class Ground:
    """The servers that a storm may use.

    Attributes:
        shares_broker: Whether other tests use the same RabbitMQ.
        outages: The schedule that stops the servers, if the actions do not stop them.
    """

    stoppable: StoppableServers
    removable_names: tuple[str, ...]
    database_url: str
    topology: Topology
    shares_broker: bool
    outages: Outages | None = None

    @property
    def urls(self) -> Mapping[str, str]:
        return {POSTGRES: self.database_url, RABBITMQ: self.stoppable.servers.amqp_url}
