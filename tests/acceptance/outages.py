"""Servers that a test may take away and bring back, with their data, on their ports."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import psycopg

from dispatcher.dev.keeper import Plan
from dispatcher.dev.processes import Processes
from dispatcher.dev.servers import Servers, status
from tests.supervisor.program import eventually

POSTGRES: Final = "postgres"
RABBITMQ: Final = "rabbitmq"
BOOT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Removable:
    """A set of private servers of one's own."""

    servers: Servers

    def take_away(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends a server by a signal; returns when it is gone."""
        self.send(name, number)
        eventually(lambda: self.is_gone(name), f"the end of {name}")

    def bring_back(self, name: str) -> None:
        """Starts it again; returns when it takes clients."""
        self.launch(name)
        eventually(lambda: self.answers(name), f"the return of {name}", seconds=BOOT_SECONDS)

    def send(self, name: str, number: signal.Signals) -> int:
        """Signals a server that runs; returns its pid."""
        pid = self._pid(name)
        os.kill(pid, number)
        return pid

    def is_gone(self, name: str) -> bool:
        """Whether it has ended, and its keeper knows, who starts nothing that it takes for running."""
        return self._processes.exit_report(name) is not None and name not in self._processes.running()

    def is_replaced(self, name: str, pid: int) -> bool:
        """Whether another one has taken its place: when any server starts, all start that are gone."""
        return self._processes.running().get(name, pid) != pid

    def launch(self, name: str) -> None:
        """Starts a server that is gone."""
        self._processes.launch(name, self.plan(name))

    def plan(self, name: str) -> Plan:
        """How it is started: program, environment, folder."""
        plan: Plan = json.loads((self.servers.folder / "plan" / f"{name}.json").read_text())
        return plan

    def freeze(self, name: str) -> None:
        """Lets it hang, with every connection open, until `thaw`."""
        self._signal_family(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Lets it go on; harmless if it does."""
        self._signal_family(name, signal.SIGCONT)

    def restore(self) -> None:
        """Everything is there again, whatever a test has done."""
        for name in (POSTGRES, RABBITMQ):
            if name in self._processes.running():
                self.thaw(name)
            else:
                self.bring_back(name)

    @property
    def _processes(self) -> Processes:
        return Processes(self.servers.folder)

    def _pid(self, name: str) -> int:
        return status(self.servers.folder).pids[name]

    def _signal_family(self, name: str, number: signal.Signals) -> None:
        from dispatcher.dev.keeper import descendants

        pid = self._pid(name)
        for member in (pid, *descendants(pid)):
            with suppress(ProcessLookupError):
                os.kill(member, number)

    def answers(self, name: str) -> bool:
        """Whether it takes clients."""
        if name == POSTGRES:
            with suppress(psycopg.OperationalError), psycopg.connect(self.servers.database_url, connect_timeout=2):
                return True
            return False
        parts = urlsplit(self.servers.amqp_url)
        with suppress(OSError), socket.create_connection((parts.hostname, parts.port), timeout=2) as client:
            client.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(client.recv(1))
        return False
