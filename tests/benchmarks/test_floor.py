"""Each part of the floor processes every email, with the product's statements."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import psycopg
import pytest
import uvloop

from benchmarks.doubles import Double, running_double
from benchmarks.floor import overhead_by_cpu, overhead_by_the_clock
from benchmarks.floor_parts import ELAPSED, PARTS, Places, Sizes, measure_alone, measure_together
from benchmarks.rig import database, drafts, passing_topology
from dispatcher import enqueue_many
from dispatcher.dev.servers import Servers
from tests.waiting import wait_until

EMAILS: Final = 300
SIZES: Final = Sizes(prefetch=64, lease_batch=50, record_batch=40, in_flight=8)


@pytest.mark.slow
@pytest.mark.parametrize("bundle", [1, 16])
def test_every_part_handles_every_email_and_has_a_cost(servers: Servers, tmp_path: Path, bundle: int) -> None:
    with _places(servers, tmp_path) as (places, double):
        enqueued = _enqueue(places)

        costs = uvloop.run(measure_alone(places, replace(SIZES, bundle=bundle), EMAILS))

        assert tuple(costs) == PARTS
        assert all(used["client"] > 0 and used[ELAPSED] > 0 for used in costs.values())
        assert _recorded(places) == EMAILS
        wait_until(lambda: double.acceptances().keys() == enqueued)


@pytest.mark.slow
def test_concurrent_parts_each_handle_all_their_emails(servers: Servers, tmp_path: Path) -> None:
    with _places(servers, tmp_path / "one") as (places, double), _places(servers, tmp_path / "other") as (other, _):
        _enqueue(places)

        costs = uvloop.run(measure_together(places, other, SIZES, EMAILS, lambda: _enqueue(other)))

        assert costs["client"] > 0
        assert _recorded(other) == EMAILS
        wait_until(lambda: len(double.acceptances()) == EMAILS)


def test_the_overhead_is_the_cost_of_the_chain_beyond_its_parts() -> None:
    chain = {"client": 300.0, "postgresql": 150.0, "rabbitmq": 50.0, "double": 1.0, ELAPSED: 180.0}
    floor = {"client": 250.0, "postgresql": 100.0, "rabbitmq": 50.0, "double": 99.0, ELAPSED: 160.0}

    assert overhead_by_cpu(chain, floor) == 0.25
    assert overhead_by_the_clock(chain, floor) == 0.125


@contextmanager
def _places(servers: Servers, folder: Path) -> Iterator[tuple[Places, Double]]:
    with (
        database(servers) as url,
        passing_topology(servers) as topology,
        running_double("sendgrid", folder) as double,
    ):
        assert double.pid is not None
        host, roots = double.environment["DISPATCHER_SENDGRID_HOST"], {"double": double.pid}
        yield Places(url, servers.amqp_url, topology.exchange, topology.queue, host, double.ca_file, roots), double


def _enqueue(places: Places) -> set[str]:
    with psycopg.connect(places.database_url, autocommit=True) as connection:
        return {str(one.email_id) for one in enqueue_many(connection, drafts(EMAILS, secrets.token_hex(4)))}


def _recorded(places: Places) -> int:
    with psycopg.connect(places.database_url) as connection:
        row = connection.execute(
            "select count(*) from email_log join every_attempt using (email_id) where status = 'sent'"
        ).fetchone()
    assert row is not None
    return int(row[0])
