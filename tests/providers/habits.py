"""Where one provider by its nature differs from the others, for the conformance suite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Habits:
    """What an adapter cannot change about its provider; as it stands, that of a plain mail server.

    Attributes:
        own_headers: Those of ours that it replaces with its own, or of which it takes none.
        takes_empty_files: Whether an attachment may have no content.
    """

    own_headers: frozenset[str] = frozenset()
    takes_empty_files: bool = True


PLAIN = Habits()
