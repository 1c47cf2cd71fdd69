"""Private servers that a test may stop and restart. A restarted server keeps its data and its port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
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
class StoppableServers:
    servers: Servers

    def stop(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.send(name, number)
        eventually(lambda: self.has_ended(name), f"the exit of {name}")

    def restart(self, name: str) -> None:
        self.launch(name)
        eventually(lambda: self.answers(name), f"the restart of {name}", seconds=BOOT_SECONDS)

    def send(self, name: str, number: signal.Signals) -> int:
        pid = self._pid(name)
        os.kill(pid, number)
        return pid

    def has_ended(self, name: str) -> bool:
        """Whether the server has exited and the process that started it has noticed. Before that, `launch` does not
        restart the server."""
        return self._processes.exit_report(name) is not None and name not in self._processes.running()

    def is_replaced(self, name: str, pid: int) -> bool:
        """Whether a new process has replaced the process `pid`. A start of any server also restarts all servers that
        have exited."""
        return self._processes.running().get(name, pid) != pid

    def launch(self, name: str) -> None:
        self._processes.launch(name, self.plan(name))

    def plan(self, name: str) -> Plan:
        plan: Plan = json.loads((self.servers.folder / "plan" / f"{name}.json").read_text())
        return plan

    def set_watermark(self, fraction: str) -> subprocess.Popen[bytes]:
        """Start a change of the share of memory above which RabbitMQ raises an alarm. Without a time limit, the command
        would wait without end for a node that has ended."""
        plan, none = self.plan(RABBITMQ), subprocess.DEVNULL
        node = plan["env"]["RABBITMQ_NODENAME"]
        command = ["./rabbitmqctl", "--timeout", "20", "-n", node, "set_vm_memory_high_watermark", fraction]
        return subprocess.Popen(
            ["/bin/sh", *command], cwd=plan["cwd"], env=plan["env"], stdin=none, stdout=none, stderr=none
        )

    def freeze(self, name: str) -> None:
        """Make a server hang until `thaw`. Its connections stay open."""
        self._signal_family(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal_family(name, signal.SIGCONT)

    def restore(self) -> None:
        for name in (POSTGRES, RABBITMQ):
            if name in self._processes.running():
                self.thaw(name)
            else:
                self.restart(name)

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
        if name == POSTGRES:
            with suppress(psycopg.OperationalError), psycopg.connect(self.servers.database_url, connect_timeout=2):
                return True
            return False
        parts = urlsplit(self.servers.amqp_url)
        with suppress(OSError), socket.create_connection((parts.hostname, parts.port), timeout=2) as client:
            client.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(client.recv(1))
        return False
