"""A Django project as a program for tests: `python -m tests.contrib.django_project URL COMMAND`.

`order 17` requests a page that stores an order and sends its receipt, and prints the answer; `order 17 dies` is killed
after the commit, before the answer. `reset` sets a new password with Django's views. `check` prints the ids of what the
system checks find.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from urllib.parse import urlsplit

import django
from django.conf import settings
from django.core import checks, mail
from django.core.management import call_command
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import include, path

BACKEND = "dispatcher.contrib.django.EmailBackend"
APPS = ("django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions", "django.contrib.admin")
IS_OLD = django.VERSION < (6, 1)


def database(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    where = {"NAME": parts.path[1:], "USER": parts.username, "PASSWORD": parts.password, "HOST": parts.hostname}
    return {"ENGINE": "django.db.backends.postgresql", **where, "PORT": parts.port, "ATOMIC_REQUESTS": True}


def configure(url: str, engine: str = "postgresql", sender: str = "shop@example.com", *middleware: str) -> None:
    settings.configure(
        **{"EMAIL_BACKEND": BACKEND} if IS_OLD else {"MAILERS": {"default": {"BACKEND": BACKEND}}},
        DATABASES={"default": {**database(url), "ENGINE": f"django.db.backends.{engine}"}},
        INSTALLED_APPS=[*APPS, "dispatcher.contrib.django"],
        MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware", *middleware],
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        DEFAULT_FROM_EMAIL=sender,
        SERVER_EMAIL="shop@example.com",
        SECRET_KEY="test",
        ALLOWED_HOSTS=["*"],
    )
    django.setup()
    patterns = [path("orders/<int:number>", place_order), path("accounts/", include("django.contrib.auth.urls"))]
    settings.ROOT_URLCONF = type("Urls", (), {"urlpatterns": patterns})


def place_order(request: HttpRequest, number: int) -> HttpResponse:
    """Fails, and so rolls back, for number 0."""
    with connection.cursor() as cursor:
        cursor.execute("insert into orders (number) values (%s) on conflict do nothing", [number])
    key = {"Idempotency-Key": f"order-{number}-receipt"}
    receipt = mail.EmailMessage("Your order", "Thank you.", to=["ann@example.org"], headers=key)
    receipt.send()
    if number == 0:
        raise RuntimeError("the view fails")
    return HttpResponse(str(receipt.email_id))


def dying(get_response: Any) -> Any:
    """Middleware that kills the process after the view's transaction."""

    def respond(request: HttpRequest) -> None:
        get_response(request)
        os.kill(os.getpid(), signal.SIGKILL)

    return respond


def order(url: str, number: str, *fault: str) -> None:
    configure(url, "postgresql", "shop@example.com", *(["tests.contrib.django_project.dying"] if fault else []))
    answer = Client(raise_request_exception=False).get(f"/orders/{number}")
    print(answer.status_code, answer.content.decode() if answer.status_code == 200 else "")


def reset(url: str) -> None:
    configure(url)
    from django.contrib.auth.models import User

    call_command("migrate", verbosity=0)
    User.objects.create_user("ann", "ann@example.org", "before")
    client = Client()
    assert client.post("/accounts/password_reset/", {"email": "ann@example.org"}).status_code == 302
    with connection.cursor() as cursor:
        cursor.execute("select text_body from dispatcher.email_content")
        ((text,),) = cursor.fetchall()
    form = client.get(next(line for line in text.splitlines() if line.startswith("http://testserver/accounts/reset/")))
    new = {"new_password1": "afterwards-1", "new_password2": "afterwards-1"}
    assert client.post(form["Location"], new).status_code == 302
    assert User.objects.get().check_password("afterwards-1")


def check(url: str, engine: str, sender: str) -> None:
    configure(url, engine, sender)
    found = [message.id for message in checks.run_checks(databases=["default"])]
    print(" ".join(sorted(each for each in found if each.startswith("dispatcher."))))


if __name__ == "__main__":
    commands: dict[str, Any] = {"order": order, "reset": reset, "check": check}
    commands[sys.argv[2]](sys.argv[1], *sys.argv[3:])
