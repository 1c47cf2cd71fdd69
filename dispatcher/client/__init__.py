"""A typed client of the HTTP API, synchronous and asynchronous.

    with Client("http://127.0.0.1:8025", key="ed_…") as client:
        receipt = client.send(Email(message_key="order-17-receipt", sender="shop@example.com", to="ann@example.org", …))
        client.get(receipt.id).status

The client repeats a request that gets no response or a temporary error. The email's message key stays the same, so the
API enqueues the email once, even if a request or response is lost. `Email` validates its fields before the request.
"""

from dispatcher.client.clients import AsyncClient, AsyncEvents, Client, Events
from dispatcher.client.results import ApiProblem, EmailPage, FeedEvent, NoResponse, Receipt, Refused, WebhookTest
from dispatcher.domain.email_history import Attempt, EmailStatus, Moment, ProviderEvent, WaitStatus
from dispatcher.domain.listed_email import ListedEmail

__all__ = [
    "ApiProblem",
    "AsyncClient",
    "AsyncEvents",
    "Attempt",
    "Client",
    "EmailPage",
    "EmailStatus",
    "Events",
    "FeedEvent",
    "ListedEmail",
    "Moment",
    "NoResponse",
    "ProviderEvent",
    "Receipt",
    "Refused",
    "WaitStatus",
    "WebhookTest",
]
