"""A worker is up after its first attempt to connect to RabbitMQ, even if that attempt failed."""

from __future__ import annotations

from tests.waiting import until
from tests.worker.bench import Bench


async def test_a_worker_is_up_once_it_consumes(bench: Bench) -> None:
    worker = await bench.start()
    assert not worker.process_slot.is_up

    await until(lambda: worker.process_slot.is_up)

    await bench.enqueue(1)
    await bench.settled({"sent": 1})


async def test_a_worker_is_up_also_while_rabbitmq_is_unreachable(bench: Bench) -> None:
    worker = await bench.start(AMQP_URL="amqp://guest:guest@127.0.0.1:1/")

    await until(lambda: worker.process_slot.is_up)

    await worker.stop()
