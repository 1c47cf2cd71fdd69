"""The sender addresses that an API key allows."""

from __future__ import annotations

from dispatcher.store.api_keys import ApiKey
from dispatcher.store.comparable_address import comparable_address


def may_send_from(sender: str, key: ApiKey) -> bool:
    """Whether a key allows a sender.

    Args:
        sender: A valid address, or the sender of an SMS, which may be empty.
    """
    if not sender or (key.sender_domains is None and key.sender_addresses is None):
        return True  # without a sender, an SMS gets the default sender, which the operator has set
    address = comparable_address(sender) if "@" in sender else sender
    return address.rpartition("@")[2] in (key.sender_domains or ()) or address in (key.sender_addresses or ())
