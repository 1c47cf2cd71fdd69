"""The parts of the floor: each does its part of the work for every email, with the statements that the product has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg

from benchmarks.doubles import running_double
from benchmarks.floor import overhead
from benchmarks.floor_parts import PARTS, Places, Sizes, measure_parts
from benchmarks.rig import database, drafts, passing_topology
from dispatcher import enqueue_many
from dispatcher.dev.servers import Servers

EMAILS = 300


def test_every_part_is_done_for_every_email_and_costs_something(servers: Servers, tmp_path: Path) -> None:
    with (
        database(servers) as url,
        passing_topology(servers) as topology,
        running_double("sendgrid", tmp_path) as double,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        enqueued = {str(answer.email_id) for answer in enqueue_many(connection, drafts(EMAILS))}
        host = double.environment["DISPATCHER_SENDGRID_HOST"]
        assert double.pid is not None
        roots = {"double": double.pid}
        places = Places(url, servers.amqp_url, topology.exchange, topology.queue, host, double.ca_file, roots)

        costs = asyncio.run(measure_parts(places, Sizes(64, 50, 40, 8), EMAILS))
        recorded = connection.execute(
            "select count(*) from email_log join email_attempt using (email_id) where status = 'sent'"
        ).fetchone()

    assert tuple(costs.by_part) == PARTS
    assert all(used["client"] > 0 for used in costs.by_part.values())
    assert recorded == (EMAILS,)
    assert double.acceptances().keys() == enqueued


def test_the_overhead_is_what_the_chain_costs_beyond_its_parts() -> None:
    assert overhead({"ours": 300.0, "postgresql": 200.0}, {"ours": 250.0, "postgresql": 150.0}) == 0.25
