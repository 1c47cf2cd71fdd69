"""Our own log as a channel: always there, also where nobody configured another."""

from __future__ import annotations

from dispatcher.alerts.wording import summary
from dispatcher.domain.alert import SEVERITY, Notice, Phase
from dispatcher.telemetry.log import get_log


class LogChannel:
    """See the module."""

    name = "log"

    async def send(self, notice: Notice) -> str:
        """See `Channel`; never fails."""
        alert, log = notice.alert, get_log()
        if notice.phase is Phase.RESOLVED:
            log.info("alert.resolved", kind=alert.kind, queue=alert.queue, summary=summary(notice))
            return "logged"
        log.error(
            "alert.raised",
            severity=SEVERITY,
            component=notice.alert.component,
            kind=alert.kind,
            phase=notice.phase,
            queue=alert.queue,
            count=alert.count,
            oldest_age_seconds=alert.oldest_age_seconds,
            correlation_ids=alert.correlation_ids,
            reason=alert.reason,
            alone=alert.is_alone,
            summary=summary(notice),
        )
        return "logged"
