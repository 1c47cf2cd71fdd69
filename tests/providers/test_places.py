"""Places are given in order, and none is lost with who gives up."""

from __future__ import annotations

import asyncio

from dispatcher.providers.places import Places


async def _waiting(places: Places) -> asyncio.Task[None]:
    """Somebody who waits for a place."""
    task = asyncio.create_task(places.wait())
    await asyncio.sleep(0)
    return task


async def _heard() -> None:
    """Lets everybody hear what he was told."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_no_more_than_there_are_can_be_taken() -> None:
    places = Places(2)

    assert [places.take() for _ in range(3)] == [True, True, False]

    places.give_back()
    assert [places.take() for _ in range(2)] == [True, False]


async def test_who_has_waited_longest_gets_the_next() -> None:
    places = Places(1)
    assert places.take()
    first, second = await _waiting(places), await _waiting(places)

    places.give_back()
    await _heard()

    assert (first.done(), second.done()) == (True, False)
    assert not places.take(), "the first has it"
    places.give_back()
    await second


async def test_who_gives_up_takes_no_place() -> None:
    places = Places(1)
    assert places.take()
    first, second = await _waiting(places), await _waiting(places)
    first.cancel()
    await _heard()

    places.give_back()
    await second

    assert not places.take(), "the second has it"


async def test_who_gives_up_in_the_moment_in_which_he_gets_one_passes_it_on() -> None:
    places = Places(1)
    assert places.take()
    first, second = await _waiting(places), await _waiting(places)

    places.give_back()
    first.cancel()
    await second

    assert first.cancelled()
    places.give_back()
    assert places.take()
