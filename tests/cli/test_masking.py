"""No command shows a password, in whatever form the setting contains it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.cli.config import masked, without_login, without_path


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ann:secret@db:5432/mail", "postgresql://ann:***@db:5432/mail"),
        ("postgresql://db/mail", "postgresql://db/mail"),
        ("postgresql://ann@db/mail", "postgresql://ann@db/mail"),
        ("postgresql:///mail?host=/run&password=secret&user=ann", "postgresql:///mail?host=/run&password=***&user=ann"),
        ("postgresql://ann@db/mail?sslpassword=secret", "postgresql://ann@db/mail?sslpassword=***"),
        ("host=db password=secret dbname=mail", "host=db password=*** dbname=mail"),
        ("host=db password='se cr\\'et' dbname=mail", "host=db password=*** dbname=mail"),
        ("host=db PASSWORD = secret", "host=db PASSWORD = ***"),
        ("amqp://ann:se%2Fcret@mq:5672/%2F?heartbeat=10", "amqp://ann:***@mq:5672/%2F?heartbeat=10"),
        ("smtp://ann:se@cret@mx:587", "smtp://ann:***@mx:587"),
        ("amqp://ann:se/cr#et?@mq/", "amqp://ann:***@mq/"),
        ("amqp://ann:se@x@a/,amqp://bob:se,c@b/mail", "amqp://ann:***@a/,amqp://bob:***@b/mail"),
        ("amqp://ann:se,amqp://cret@mq/", "amqp://ann:***@mq/"),
        ("amqp://mq/,amqp://ann:secret@mq/", "***"),
        (
            "postgresql://ann:secret@a:1,b:2/m?target_session_attrs=any",
            "postgresql://ann:***@a:1,b:2/m?target_session_attrs=any",
        ),
        ("SG.abcdef", "***"),
        ("", "***"),
    ],
)
def test_the_password_is_masked_and_the_host_is_shown(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://hooks.slack.com/services/T0/B0/secret", "https://hooks.slack.com/***"),
        ("https://hooks.example:8443?token=secret", "https://hooks.example:8443/***"),
        ("https://[::1]/secret", "https://[::1]/***"),
        ("https://secret@hooks.example/x", "***"),
        ("secret", "***"),
    ],
)
def test_only_the_host_of_a_url_with_a_secret_path_is_shown(text: str, shown: str) -> None:
    assert without_path(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:secret@ses.example", "https://***@ses.example"),
        ("https://ses.example?api_key=secret&a=b", "https://ses.example?api_key=***&a=b"),
        ("https://user:se@cr/et@ses.example", "https://***@ses.example"),
        ("https://ses.example", "https://ses.example"),
        ("ann:secret@ses.example", "***@ses.example"),
        ("a@example.com, Shop <b@example.com>", "a@example.com, Shop <b@example.com>"),
        ("127.0.0.1:9464", "127.0.0.1:9464"),
    ],
)
def test_a_login_in_a_setting_that_is_not_secret_is_masked(text: str, shown: str) -> None:
    assert without_login(text) == shown


@given(password=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_no_password_of_a_url_is_shown(password: str) -> None:
    assert masked(f"amqp://ann:{password}@mq:5672/") == "amqp://ann:***@mq:5672/"
