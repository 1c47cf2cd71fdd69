"""Django's default settings. `PEER_TUNED` makes them faster but not less safe; `PEER_LEASING` also makes them safer."""

from __future__ import annotations

import os
from datetime import timedelta
from urllib.parse import unquote, urlsplit

from benchmarks.peers import application

_settings = application.settings()
_database = urlsplit(_settings.database_url)

SECRET_KEY = "benchmark"  # noqa: S105
USE_TZ = True
INSTALLED_APPS = ["post_office", "anymail", "benchmarks.peers.post_office.apps.Shop"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": _database.hostname,
        "PORT": _database.port,
        "USER": unquote(_database.username or ""),
        "PASSWORD": unquote(_database.password or ""),
        "NAME": _database.path.removeprefix("/"),
        "CONN_MAX_AGE": None,
    }
}
ANYMAIL: dict[str, object] = {"SENDGRID_API_KEY": "SG.benchmark", "SENDGRID_API_URL": f"{_settings.sendgrid_host}/v3/"}
EMAIL_BACKEND = "post_office.EmailBackend"
POST_OFFICE: dict[str, object] = {"BACKENDS": {"default": "anymail.backends.sendgrid.EmailBackend"}}

if os.environ.get("PEER_TUNED"):
    POST_OFFICE = {
        "BACKENDS": {"default": "benchmarks.peers.post_office.sendgrid.EmailBackend"},
        "BATCH_SIZE": int(os.environ["PEER_BATCH"]),
        "THREADS_PER_PROCESS": int(os.environ["PEER_THREADS"]),
        "LOG_LEVEL": 1,
    }
    ANYMAIL["SENDGRID_GENERATE_MESSAGE_ID"] = False
    LOGGING_CONFIG = None

if os.environ.get("PEER_LEASING"):
    POST_OFFICE |= {
        "BACKENDS": {"default": "benchmarks.peers.post_office.leasing.EmailBackend"},
        # While another worker has an email's lease, the email is queued again until the lease ends.
        "RETRY_INTERVAL": timedelta(seconds=_settings.lease_seconds),
        "MAX_RETRIES": 1000,
    }
