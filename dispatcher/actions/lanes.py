"""List the lanes of emails, and set their shares, policies and senders.

DISPATCHER_LANES names the lanes, most urgent first. Each lane has its own send queue, and a share of the workers and
of the providers' rates. A lane's policy says how often and for how long an email is tried, and what happens to an
email whose outcome is unknown. See docs/lanes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dispatcher.actions.action import Change, Listing, Mistake, Mistakes, Refusal, field
from dispatcher.domain.controls import DeletedLane, Lane, LanePolicy
from dispatcher.domain.instant import parse_length
from dispatcher.domain.kinds import LIMIT, Kind, number, one_of, text, whole
from dispatcher.domain.status import OnUncertain

MAX_SECONDS: Final = 366 * 86_400
LANE: Final = text(100, metavar="LANE")


def check_lane(lane: str, settings: Any) -> None:
    """Checks that this host's settings contain the lane; otherwise raises `Mistakes`."""
    if lane not in settings.lanes:
        raise Mistakes([Mistake("lane", f"must be one of DISPATCHER_LANES: {', '.join(settings.lanes)}")])


def _sender(value: object) -> str:
    """A sender in the form in which a lane's rule stores senders."""
    from dispatcher.store.comparable_address import comparable_address

    if not isinstance(value, str):
        raise TypeError
    return comparable_address(f"x{value}").removeprefix("x") if value.startswith("@") else comparable_address(value)


SENDER: Final = Kind(
    "must be an address (otp@example.com) or a domain (@example.com)",
    {"type": "string", "minLength": 3, "maxLength": 320},
    _sender,
    metavar="SENDER",
)
REDELIVERY: Final = Kind(
    "must be a length of time such as 4h, at most 366 days, or `off`",
    {"type": "number", "minimum": 0, "maximum": MAX_SECONDS},
    number(0, MAX_SECONDS).read,
    lambda given: 0.0 if given == "off" else parse_length(given),
    "TIME",
)


class ListLanes(Listing[Lane], name="lanes list", http="GET /v1/lanes"):
    """List the lanes with their shares, policies, queues and senders.

    `share` is the lane's part of the workers and of the providers' rates while every lane has emails. If a lane has no
    emails, the other lanes use its share. A lane that DISPATCHER_LANES does not contain, but for which something is
    set, has the share 0. Null, or `-` in the table, means that nothing is set for the lane, so the host's setting
    applies: DISPATCHER_ON_UNCERTAIN, DISPATCHER_MAX_ATTEMPTS or DISPATCHER_REDELIVER_FOR.
    """

    examples = ("lanes list", "lanes list --json | jq '.lanes[] | {lane, share}'")

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        del source
        return {"settings": settings}

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> list[Lane]:
        from dispatcher.domain.lanes import NORMAL
        from dispatcher.domain.turns import LaneWeights
        from dispatcher.store.controls import list_lane_policies, list_lane_rules

        settings = parameters["settings"]
        policies = {each.lane: each for each in await list_lane_policies(source)}
        senders: dict[str, list[str]] = {}
        for rule in await list_lane_rules(source):
            senders.setdefault(rule.lane, []).append(rule.sender)
        weights = LaneWeights(settings.lanes)
        weights.update(policies)
        total = sum(map(weights.of, settings.lanes))
        found = []
        for lane in dict.fromkeys([*settings.lanes, *policies, *senders]):
            policy, is_used = policies.get(lane) or LanePolicy(lane, weights.of(lane)), lane in settings.lanes
            share, queue = weights.of(lane) / total if is_used else 0.0, settings.queue_of(lane if is_used else NORMAL)
            set_by_operators = policy.weight, policy.on_uncertain, policy.max_attempts, policy.redeliver_seconds
            found.append(Lane(lane, *set_by_operators, share, queue, tuple(senders.get(lane, ()))))
        return found


class SetLane(Change[LanePolicy], name="lanes set", http="PUT /v1/lanes/{lane}", query="set_lane"):
    """Set a lane's share and policy, or the lane of a sender's emails. Values that you leave out do not change.

    All hosts apply a new share within two seconds. While the most urgent lane has emails, its share is at least 20 %,
    even if its weight is small. A new policy applies only to emails that are enqueued from now on, because the policy
    is stored with each email when it is enqueued. With on_uncertain=resend, a recipient may get an email twice. A
    sender's new lane also applies to emails that are enqueued from now on. If an email or its API key names a lane,
    that lane is used instead of the sender's lane.
    """

    lane: str = field(LANE, "The lane.")
    weight: float | None = field(
        LIMIT,
        "The lane's share of the workers and of the providers' rates, relative to the other lanes that have emails.",
        default=None,
    )
    on_uncertain: OnUncertain | None = field(
        one_of(OnUncertain),
        "What happens to an email whose outcome is unknown, unless the email has its own setting.",
        default=None,
    )
    max_attempts: int | None = field(whole(1, 1000), "The most attempts for an email.", default=None)
    redeliver_seconds: float | None = field(
        REDELIVERY,
        "For how long a deferred email is tried again, such as 4h, or off: not at all.",
        default=None,
        option="--redeliver-for",
    )
    sender: str | None = field(
        SENDER,
        "Assign this sender to the lane: an address (otp@example.com) or a domain (@example.com).",
        default=None,
        option="--from",
    )

    some_of = ("weight", "on_uncertain", "max_attempts", "redeliver_seconds", "sender")
    needs_reason = False
    tells_row = True
    done = (
        "All hosts apply a new share within two seconds. The other values apply to emails that are enqueued from now "
        "on. For all else, the hosts' settings apply."
    )
    examples = (
        "lanes set urgent --on-uncertain resend --max-attempts 3",
        "lanes set bulk --weight 5 --redeliver-for 4h",
        "lanes set --from otp@example.com urgent",
        "lanes set --from @news.example.com bulk",
    )

    def check(self, settings: Any) -> None:
        check_lane(self.lane, settings)

    async def prepare(self, source: Any, settings: Any) -> Mapping[str, Any]:
        from dispatcher.domain.turns import LaneWeights

        del source
        return {"default_weight": LaneWeights(settings.lanes).of(self.lane)}


class UnsetLane(Change[DeletedLane], name="lanes unset", http="DELETE /v1/lanes", query="unset_lane"):
    """Delete the share and policy of a lane, or the lane of a sender.

    A lane without its own share and policy has its default weight, and the settings of each host apply to its emails.
    If you delete the lane of a sender's address, the lane of the sender's domain applies. If the domain has no lane
    either, the lane is normal. A lane that the email or its API key names is always used instead.
    """

    lane: str | None = field(LANE, "The lane whose share and policy are deleted.", default=None)
    sender: str | None = field(SENDER, "Delete the lane of this sender.", default=None, option="--from")

    arguments = ("lane",)
    one_of = ("lane", "sender")
    refusals = (
        Refusal("nothing-set", "not-found", "Nothing is set for this lane or sender.", "See `dispatcher lanes list`."),
    )
    needs_reason = False
    done = "Nothing is set for the lane or sender any more."
    examples = ("lanes unset urgent", "lanes unset --from otp@example.com")


ACTIONS = (ListLanes, SetLane, UnsetLane)
