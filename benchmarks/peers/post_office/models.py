"""The application's own table, which makes enqueueing idempotent."""

from __future__ import annotations

from django.db import models


class Idempotency(models.Model):
    """One row per message key, inserted in the transaction that queues its email."""

    message_key = models.TextField(primary_key=True)
    email_id = models.UUIDField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        app_label = "peers_post_office"
        db_table = "email_idempotency"
