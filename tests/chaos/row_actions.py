"""The adversary's actions on the rows of the database."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Final

import psycopg

from dispatcher.domain.email_id import new_email_ids
from tests.acceptance.outages import POSTGRES
from tests.chaos.action import BROKEN
from tests.chaos.stage import StormStage
from tests.store.damage import allow_damage
from tests.store.damaged_rows import DAMAGED, insert_row

MOST: Final = 6
DAMAGED_TENANT: Final = "damaged"
"""The tenant of the damaged rows. The oracle judges all other emails."""


def damage_rows(stage: StormStage, random: Random) -> bool:
    """Insert some rows with values that Python or AMQP cannot represent, as before the schema refused them."""
    # A card of another kind publishes messages with the keys that it finds.
    chosen = random.sample([row for name, row in DAMAGED.items() if not name.startswith("message_key")], MOST)
    if stage.outages.is_away(POSTGRES):
        return False
    with suppress(*BROKEN), psycopg.connect(stage.ground.database_url, connect_timeout=2) as session:
        session.execute("set local lock_timeout = '2s'")
        session.execute("set local search_path = dispatcher")
        with allow_damage(session):
            for email_id, columns in zip(new_email_ids(MOST), chosen, strict=True):
                row = {"email_id": email_id, "tenant_id": DAMAGED_TENANT, "message_key": str(email_id)}
                insert_row(session, {**row, "publish_due_at": "now", **columns})
        return True
    return False
