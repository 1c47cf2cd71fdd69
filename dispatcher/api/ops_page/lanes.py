"""The pages Lanes (shares, policies, senders, due emails) and Tenants (statistics, due emails, shares).

Only for visitors who see all tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from starlette.routing import Route

from dispatcher.actions import lanes, tenants
from dispatcher.api.ops_page import face
from dispatcher.api.ops_page.reported_events import SHARES
from dispatcher.api.ops_page.site import Site
from dispatcher.ops.shared_reading import SharedReading
from dispatcher.store.controls import MOST_DUE, MOST_PAIRS, count_due, read_controls

DUE_SECONDS: Final = 1.0


def routes(site: Site) -> list[Route]:
    due = SharedReading(lambda: count_due(site.pool), fresh_seconds=DUE_SECONDS)

    async def more(*_: object) -> Mapping[str, Any]:
        async with site.session() as session:
            controls = await read_controls(session)
        found = await due.fresh()
        of_tenants = Counter[str]()
        for each in found:
            of_tenants[each.tenant_id] += each.emails
        return {"controls": controls, "due": found, "due_of": of_tenants}

    known = {"most_due": MOST_DUE, "most_pairs": MOST_PAIRS, "lanes": lanes, "tenants": tenants, **SHARES}
    return [
        *face.pages(site, "/lanes", lanes.ACTIONS, "lanes.html", more, **known),
        *face.pages(site, "/tenants", tenants.ACTIONS, "tenants.html", more, **known),
    ]
