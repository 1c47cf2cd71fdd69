"""The packages, installed where there is no checkout. Slow: each test downloads packages, the first one a Debian."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dispatcher.broker.topology import Topology
from dispatcher.dev.ports import choose
from dispatcher.dev.servers import Servers
from dispatcher.version import VERSION
from tests.bare_debian import Debian, build_image, make_debian, needs_root
from tests.test_packaging import copy_checkout, run_packages
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

FIRST_EMAIL = """
eval "$(dispatcher dev up)"
trap 'dispatcher dev down' EXIT
dispatcher init
dispatcher enqueue --key hello-1 --from shop@example.com --to ann@example.org --subject Hello --text "It works."
dispatcher run --workers 1 &
until cat "$DISPATCHER_CAPTURE_DIR"/new/*.eml; do kill -0 $!; sleep 0.1; done
kill $!
wait $!
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = copy_checkout(tmp_path_factory.mktemp("checkout") / "project")
    run_packages(copy, "build")
    return copy


def test_a_wheel_captures_its_first_email_without_a_checkout(checkout: Path, tmp_path: Path) -> None:
    """As after `pipx install` or, without pip, `uv tool install`, on a machine that has neither server."""
    (wheel,) = checkout.glob("dist/*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--python", f"{tmp_path}/venv/bin/python"]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", wheel], check=True)
    named = {name: value for name, value in os.environ.items() if not name.startswith(("DISPATCHER_", "PYTHON"))}
    named |= {
        "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}:{Path(sys.executable).parent}",
        "DISPATCHER_CACHE_DIR": str(tmp_path / "cache"),
        "DISPATCHER_DEV_POSTGRES": "wheel",
        "DISPATCHER_METRICS_ADDRESS": "off",
    }

    ended = subprocess.run(
        ["sh", "-euc", FIRST_EMAIL], cwd=tmp_path, env=named, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Subject: Hello" in ended.stdout


@dataclass(frozen=True)
class Server:
    """The settings of a program that uses the test's servers, and a port for its pages."""

    variables: Mapping[str, str]
    port: int

    def sends_one(self, system: Debian, *program: str, folder: str, health: str = "true") -> None:
        """Sends an email with the installed program, asks for its health, and drains it."""
        own = {
            "DISPATCHER_RUN_DIR": folder,
            "DISPATCHER_PROVIDERS": "capture",
            "DISPATCHER_CAPTURE_DIR": f"{folder}/mail",
        }
        there = system.having(**self.variables, **own, DISPATCHER_METRICS_ADDRESS=f"127.0.0.1:{self.port}")
        email = ["--key", "k-1", "--from", "a@example.com", "--to", "b@example.org", "--subject", "s", "--text", "t"]
        there.run(*program, "enqueue", *email)
        with subprocess.Popen(there.words(*program, "run", "--workers", "1")) as process:
            mail = system.root / folder.lstrip("/") / "mail" / "new"
            wait_until(lambda: process.poll() is not None or any(mail.glob("*.eml")), 60)
            there.run("/bin/sh", "-c", health.replace("9464", str(self.port)))
            assert there.drain(process) == 0


@pytest.fixture
def server(servers: Servers, database_url: str, topology: Topology) -> Server:
    names = {"EXCHANGE": topology.exchange, "QUEUE": topology.queue, "DLQ": topology.dlq, "DATABASE_URL": database_url}
    variables = servers.environment() | {f"DISPATCHER_{name}": value for name, value in names.items()}
    return Server(variables, choose(1)[0])


@needs_root
def test_the_steps_of_the_containerfile_make_a_system_that_sends_and_drains(
    checkout: Path, tmp_path: Path, server: Server
) -> None:
    """Executes the instructions in bare Debian systems. This shows that the steps work, and the image's user, health
    check and stop signal, which process 1 gets. It does not show what an engine adds: layers, volumes, networks."""
    image, described = build_image(checkout / "deploy" / "Containerfile", checkout, tmp_path)
    program, command = json.loads(described["ENTRYPOINT"]), json.loads(described["CMD"])

    assert described["STOPSIGNAL"] == "SIGTERM"
    assert image.run("id", "-u") == "10025\n"
    assert "DISPATCHER_DATABASE_URL is not set" in image.run(*program, *command, code=78)
    image.run("python", "-c", "import starlette, uvicorn, authlib, opentelemetry.sdk")
    health = described["HEALTHCHECK"].partition("CMD ")[2]
    server.sends_one(image, *program, folder=described["VOLUME"], health=health)


@needs_root
def test_the_debian_package_installs_sends_and_keeps_settings_and_ledgers(
    checkout: Path, tmp_path: Path, server: Server
) -> None:
    run_packages(checkout, "deb")
    (package,) = checkout.glob("dist/*.deb")
    release = re.findall(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)[0]
    system = make_debian(release, tmp_path / "system")
    shutil.copy(package, system.root / "email-dispatcher.deb")
    settings = system.root / "etc/email-dispatcher/dispatcher.env"

    def install() -> str:
        words = "apt-get install --yes --no-install-recommends --reinstall /email-dispatcher.deb"
        return system.run("/bin/sh", "-c", f"{words} && cat /etc/email-dispatcher/dispatcher.env")

    system.run("apt-get", "update")
    install()
    owners = system.run(
        "stat", "--format=%a %U %G", "/etc/email-dispatcher/dispatcher.env", "/var/lib/email-dispatcher"
    )
    assert owners.splitlines() == ["640 root email-dispatcher", "700 email-dispatcher email-dispatcher"]
    assert system.run("dispatcher", "--version") == f"dispatcher {VERSION}\n"
    numbers = system.run("/bin/sh", "-c", "echo $(id -u email-dispatcher):$(id -g email-dispatcher)").strip()
    server.sends_one(replace(system, user=numbers), "dispatcher", folder="/var/lib/email-dispatcher")

    settings.write_text(settings.read_text() + "DISPATCHER_PROVIDERS=smtp\n")
    assert "DISPATCHER_PROVIDERS=smtp" in install()
    system.run("apt-get", "purge", "--yes", "email-dispatcher")
    assert not settings.exists()
    assert not (system.root / "usr/lib/email-dispatcher").exists()
    assert any((system.root / "var/lib/email-dispatcher").iterdir())
