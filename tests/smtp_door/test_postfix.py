"""Postfix, which uses the SMTP door as its smarthost, loses and duplicates nothing while the door is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg
import pytest
import trustme

from dispatcher.dev import cache, debian
from dispatcher.dev.ports import choose
from tests.acceptance.conftest import host
from tests.acceptance.harness import Host
from tests.api.running_api import make_key
from tests.smtp_door.running import Client
from tests.supervisor.program import Program, eventually

__all__ = ["host"]

MESSAGES: Final = 10_000
KILLS: Final = 10
# Postfix's own users do not exist where its package is only unpacked. Debian has these two users on each system.
MAIN: Final = """
compatibility_level = 3.6
queue_directory = {folder}/spool
data_directory = {folder}/data
daemon_directory = {programs}/usr/lib/postfix/sbin
command_directory = {programs}/usr/sbin
maillog_file = {folder}/log
maillog_file_prefixes = /
mail_owner = news
setgid_group = uucp
myhostname = web1.example.com
inet_interfaces = 127.0.0.1
mydestination =
alias_maps =
mynetworks = 127.0.0.0/8
smtpd_relay_restrictions = permit_mynetworks, reject
smtpd_client_connection_count_limit = 0
import_environment = MAIL_CONFIG LD_LIBRARY_PATH
relayhost = [127.0.0.1]:{door}
smtp_sasl_auth_enable = yes
smtp_sasl_password_maps = texthash:{folder}/password
smtp_sasl_security_options = noanonymous
smtp_tls_security_level = encrypt
minimal_backoff_time = 1s
maximal_backoff_time = 2s
queue_run_delay = 1s
"""
MASTER: Final = """
127.0.0.1:{port} inet n - n - - smtpd
cleanup unix n - n - 0 cleanup
qmgr unix n - n 1 1 qmgr
tlsmgr unix - - n 1000? 1 tlsmgr
rewrite unix - - n - - trivial-rewrite
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
smtp unix - - n - - smtp
relay unix - - n - - smtp
error unix - - n - - error
retry unix - - n - - error
proxymap unix - - n - - proxymap
scache unix - - n - 1 scache
anvil unix - - n - 1 anvil
postlog unix-dgram n - n - 1 postlogd
"""


@pytest.fixture
def database_url(own_database_url: str) -> str:
    return own_database_url


def unpacked() -> Path:
    def build(folder: Path) -> None:
        debian.fetch("postfix", folder, even_if_installed="postfix", remedy="Use a Debian system.", progress=print)

    return cache.obtain(f"postfix-{debian.system()}", build)


class Postfix:
    """A Postfix in a folder, which accepts emails at `port` without a login."""

    def __init__(self, folder: Path, door: int, token: str) -> None:
        (self.port,) = choose(1)
        programs = unpacked()
        shutil.rmtree(folder, ignore_errors=True)
        for each in (folder, folder / "data", folder / "spool"):
            each.mkdir(mode=0o755)
        shutil.chown(folder / "data", "news")
        values = {"folder": folder, "programs": programs, "door": door, "port": self.port}
        (folder / "main.cf").write_text(MAIN.format(**values))
        (folder / "master.cf").write_text(MASTER.format(**values))
        (folder / "password").write_text(f"[127.0.0.1]:{door} web1:{token}\n")
        environ = {"PATH": os.defpath, "LD_LIBRARY_PATH": str(programs / "usr/lib/postfix"), "MAIL_CONFIG": str(folder)}
        for name in (
            "active",
            "bounce",
            "corrupt",
            "defer",
            "deferred",
            "flush",
            "hold",
            "incoming",
            "private",
            "saved",
        ):
            (folder / "spool" / name).mkdir(mode=0o700)
            shutil.chown(folder / "spool" / name, "news")
        for name in ("public", "maildrop", "pid"):
            (folder / "spool" / name).mkdir(mode=0o755)
        shutil.chown(folder / "spool/public", "news")
        self.log = folder / "log"
        master = programs / "usr/lib/postfix/sbin/master"
        self.process = subprocess.Popen([master, "-c", folder, "-d"], env=environ, cwd=folder / "spool")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder into which Postfix's user can change."""
    folder = Path(f"/tmp/postfix-{os.getpid()}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


async def inject(port: int, numbers: range) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(reader, writer)
    assert (await client.reply()).startswith("220")
    await client.say("EHLO a")
    for number in numbers:
        for line in ("MAIL FROM:<www-data@web1.example.com>", *(f"RCPT TO:<{one}>" for one in people(number)), "DATA"):
            assert (await client.say(line))[:3] in ("250", "354")
        head = f"From: shop@example.com\r\nTo: {', '.join(people(number))}\r\nSubject: Order {number}\r\n\r\n"
        assert (await client.say(head.encode() + b"Thank you.\r\n" * 20 + b".\r\n")).startswith("250")
    writer.close()


def people(number: int) -> tuple[str, str]:
    return f"u{number}@example.org", f"v{number}@example.net"


# Slow, because it takes minutes until Postfix has tried everything again.
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="Postfix starts only as root")
async def test_postfix_delivers_each_email_once_while_the_door_is_killed(
    host: Host, folder: Path, tmp_path: Path
) -> None:
    certificate = tmp_path / "submission.pem"
    certificate.write_bytes(trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.bytes())
    (port,) = choose(1)
    with psycopg.connect(host.database_url, autocommit=True) as connection:
        connection.execute("set search_path to dispatcher")
        token = make_key(connection, sender_domains=["example.com"], sender_addresses=[])

        def started() -> Program:
            door = host.command(
                "smtp", "--share-port", SUBMISSION_ADDRESS=f"127.0.0.1:{port}", SUBMISSION_TLS="starttls",
                SUBMISSION_CERTIFICATE=certificate, LOG_FORMAT="json",
            )  # fmt: skip
            eventually(lambda: door.events("submission.started"), "the start of the door")
            return door

        def count() -> int:
            (found,) = connection.execute("select count(*) from email_log").fetchone() or (0,)
            return int(found)

        doors = [await asyncio.to_thread(started) for _ in range(2)]
        postfix = Postfix(folder, port, token)
        try:
            await asyncio.to_thread(eventually, lambda: is_open(postfix.port), "the start of Postfix")
            part = MESSAGES // 10
            injecting = [
                asyncio.create_task(inject(postfix.port, range(start, start + part)))
                for start in range(0, MESSAGES, part)
            ]
            for kill in range(KILLS):
                wanted = MESSAGES * (kill + 1) // (KILLS + 2)
                await asyncio.to_thread(eventually, lambda wanted=wanted: count() >= wanted, "emails", seconds=300)
                doors[0].send(signal.SIGKILL)
                await asyncio.to_thread(doors[0].await_exit)
                doors = [doors[1], await asyncio.to_thread(started)]
            await asyncio.gather(*injecting)
            await asyncio.to_thread(eventually, lambda: count() >= MESSAGES, "the last emails", seconds=300)
        finally:
            postfix.stop()
        rows = connection.execute("select recipients from email_content").fetchall()
        log = postfix.log.read_text(errors="replace")

    got = Counter(each for (lists,) in rows for addresses in lists.values() for each in addresses)
    assert got == Counter(each for number in range(MESSAGES) for each in people(number))
    assert "status=deferred" in log  # the kills were noticed
    assert "status=bounced" not in log


def is_open(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
