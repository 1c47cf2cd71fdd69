"""A typed client of the HTTP API, synchronous and asynchronous.

    with Client("http://127.0.0.1:8025", key="ed_…") as client:
        receipt = client.send(Email(message_key="order-17-receipt", sender="shop@example.com", to="ann@example.org", …))
        client.get(receipt.id).status

A send that gets no answer, or is told to come back, is repeated with the same key: whatever was lost, request or
answer, the email is accepted once. What an email may be is checked before it leaves.
"""

from dispatcher.client.clients import AsyncClient, Client
from dispatcher.client.results import ApiProblem, Attempt, EmailStatus, NoAnswer, Receipt, Refused, Waiting

__all__ = ["ApiProblem", "AsyncClient", "Attempt", "Client", "EmailStatus", "NoAnswer", "Receipt", "Refused", "Waiting"]
