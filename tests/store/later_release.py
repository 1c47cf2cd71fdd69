"""A release after this one: its migrations, and its `dispatcher` as a program."""

from __future__ import annotations

import sys
from hashlib import sha256
from typing import Final
from unittest.mock import patch

from dispatcher.cli.main import main
from dispatcher.store.migrations import Migration, all_migrations

_TEXTS: Final = {
    "two_tables": """
alter table email_log add column later_note text;
alter table email_idempotency add column later_note text;
""",
    "event_index": """
alter table email_event add column later_note text;
create index email_event_later on email_event (received_at) where later_note is not null;
""",
    "listing": """
create index suppression_later on suppression (tenant_id, masked);
""",
}
LATER: Final = tuple(
    Migration(number, name, text, sha256(text.encode()).hexdigest())
    for number, (name, text) in enumerate(_TEXTS.items(), all_migrations()[-1].number + 1)
)
MIGRATIONS: Final = (*all_migrations(), *LATER)

if __name__ == "__main__":
    with patch("dispatcher.store.migrations.all_migrations", lambda: MIGRATIONS):
        sys.exit(main(sys.argv[1:]))
