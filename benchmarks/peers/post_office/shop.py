"""The application's enqueueing: one transaction for the email and its key."""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.peers.post_office.settings")
django.setup()

from django.db import transaction
from post_office import mail

from benchmarks.peers.application import Draft
from benchmarks.peers.post_office.models import Idempotency


def enqueue(_connection: Any, draft: Draft) -> None:
    """Queue the email once per key. Ignores the given connection, because Django uses its own."""
    email_id = uuid4()
    with transaction.atomic():
        _, is_new = Idempotency.objects.get_or_create(message_key=draft.message_key, defaults={"email_id": email_id})
        if is_new:
            mail.send(
                draft.recipient,
                draft.sender,
                subject=draft.subject,
                message=draft.body,
                headers={"X-Email-Id": str(email_id)},
            )
