"""Every notice contains what an operator needs, for each kind and phase."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from dispatcher.domain.alert import Kind, Notice, Phase
from dispatcher.monitor.alert_words import payload, subject, text


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("phase", Phase)
def test_every_notice_names_severity_component_queue_and_time(notice: Notice, kind: Kind, phase: Phase) -> None:
    notice = replace(notice, phase=phase, alert=replace(notice.alert, kind=kind))

    document = orjson.loads(payload(notice))

    assert document["type"] == f"alert.{phase}"
    assert document["data"]["severity"] == "CRITICAL"
    for words in (text(notice), payload(notice).decode()):
        for fact in ("CRITICAL", notice.alert.component, "email.dispatcher.dlq", "2026-05-04T03:02:01.000Z", kind):
            assert fact in words


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("phase", Phase)
def test_manual_intervention_is_requested_only_while_the_alert_is_active(
    notice: Notice, kind: Kind, phase: Phase
) -> None:
    notice = replace(notice, phase=phase, alert=replace(notice.alert, kind=kind))

    is_called = "Manual intervention is required." in text(notice)

    assert is_called == (phase in (Phase.RAISED, Phase.REMINDED))
    assert subject(notice).startswith("[CRITICAL") == is_called


def test_a_notice_without_postgresql_says_that_other_hosts_may_alert_too(notice: Notice) -> None:
    alone = replace(notice, alert=replace(notice.alert, is_alone=True))

    assert "PostgreSQL is unreachable, so every host alerts on its own" in text(alone)
    assert "PostgreSQL" not in text(notice)


def test_unknown_facts_are_left_out_of_the_text_and_null_in_json(notice: Notice) -> None:
    blind = replace(notice, alert=replace(notice.alert, count=None, oldest_age_seconds=None, correlation_ids=()))

    assert "count" not in text(blind)
    assert orjson.loads(payload(blind))["data"]["count"] is None
