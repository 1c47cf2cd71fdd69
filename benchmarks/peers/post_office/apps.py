"""The application's Django configuration."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class Shop(AppConfig):
    """Passes the application's id of each email to SendGrid. django-post_office stores the id in a header."""

    name = "benchmarks.peers.post_office"
    label = "peers_post_office"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Called by Django once everything is loaded."""
        from anymail.signals import pre_send

        pre_send.connect(name_email, weak=False)


def name_email(message: Any, **_: object) -> None:
    """Move the id from the header, which recipients would see, to SendGrid's custom arguments."""
    message.metadata = {"email_id": message.extra_headers.pop("X-Email-Id")}
