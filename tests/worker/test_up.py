"""When a worker says that it is up: once it has tried RabbitMQ, whatever came of it."""

from __future__ import annotations

from tests.waiting import until
from tests.worker.bench import Bench


async def test_a_worker_is_up_when_rabbitmq_gives_it_messages(bench: Bench) -> None:
    worker = await bench.start()
    assert not worker.seat.is_up

    await until(lambda: worker.seat.is_up)

    await bench.enqueue(1)
    await bench.settled({"sent": 1})


async def test_a_worker_is_up_without_rabbitmq_too(bench: Bench) -> None:
    worker = await bench.start(AMQP_URL="amqp://guest:guest@127.0.0.1:1/")

    await until(lambda: worker.seat.is_up)

    await worker.stop()
