"""One host under test: one `dispatcher run` after the other in one run directory; and its network of proxies."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.acceptance.outages import POSTGRES, RABBITMQ
from tests.broker.proxy import Proxy
from tests.chaos.diary import Diary
from tests.supervisor.program import Event, Program, eventually

COMMAND: Final = (sys.executable, "-m", "dispatcher.cli.main", "run")
SERVERS: Final = (POSTGRES, RABBITMQ)
TURN_SECONDS: Final = 30.0


class Network:
    """Runs the proxies in their own thread. Every method returns when the proxies have carried out the command.
    `urls` has the URL of each server's proxy."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxies = {name: Proxy(url) for name, url in urls.items()}
        self._away: frozenset[str] = frozenset()
        self._do(*self._proxies, act=Proxy.__aenter__)
        self.urls = {name: proxy.url for name, proxy in self._proxies.items()}

    @property
    def away(self) -> frozenset[str]:
        return self._away

    def cut(self, names: Collection[str]) -> None:
        """Cut the connections to these servers, and refuse new connections, until `heal`."""
        self._away |= frozenset(names)
        self._do(*names, act=Proxy.sever)

    def black_hole(self, names: Collection[str]) -> None:
        """Keep the connections to these servers open without forwarding anything, until `heal`."""
        self._away |= frozenset(names)
        self._do(*names, act=Proxy.freeze_node)

    def heal(self) -> None:
        self._do(*self._proxies, act=Proxy.thaw)
        self._away = frozenset()

    def close(self) -> None:
        self._do(*self._proxies, act=Proxy.__aexit__)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, *names: str, act: Callable[[Proxy], Awaitable[object] | None]) -> None:
        async def act_on_each() -> None:
            for name in names:
                if (acting := act(self._proxies[name])) is not None:
                    await acting

        asyncio.run_coroutine_threadsafe(act_on_each(), self._loop).result(TURN_SECONDS)


class Subject:
    """The successive runs of one host. `program` is the latest, and `is_stopping` if that one got SIGTERM."""

    program: Program
    is_stopping: bool

    def __init__(
        self,
        folder: Path,
        env: Mapping[str, str],
        diary: Diary,
        command: Sequence[str] = COMMAND,
        network: Network | None = None,
    ) -> None:
        self.name = env["DISPATCHER_HOST_NAME"]
        self.run_dir = Path(env["DISPATCHER_RUN_DIR"])
        self.network = network
        self._folder = folder
        self._env = env
        self._diary = diary
        self._command = command
        self._programs: list[Program] = []
        self.start()

    def start(self) -> None:
        self.is_stopping = False
        self.program = Program(self._command, self._folder, f"{self.name}-{len(self._programs)}", env=self._env)
        self._programs.append(self.program)

    @property
    def is_running(self) -> bool:
        return self.program.exit_code is None

    @property
    def is_up(self) -> bool:
        return self.is_running and not self.is_stopping and bool(self.program.events("dispatcher.started"))

    def find(self, role: str) -> list[int]:
        return (
            [pid for pid in self.program.children() if f"dispatcher: {role}" in _title(pid)] if self.is_running else []
        )

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to the parent if the run is up; returns whether the signal was sent."""
        if not self.is_up:
            return False
        self.program.send(number)
        return True

    def begin_stop(self) -> None:
        self.is_stopping = True
        if self.is_running:
            self.program.send(signal.SIGTERM)

    def kill(self) -> None:
        self._diary.kill(self.program.pid)
        self.program.await_exit()

    def members(self) -> list[int]:
        """The pids of all running processes of all runs, including orphans."""
        return [pid for program in self._programs for pid in program.members()]

    def await_all_ended(self) -> None:
        eventually(lambda: not self.members(), f"the end of every process of {self.name}")

    def workers(self) -> dict[str, int]:
        """The pids of the running workers that have a ledger, by the worker's name in `email_log.locked_by`."""
        pids = set(self.find("worker"))
        named = {path.stem: int(path.stem.split(":")[-2]) for path in self.run_dir.glob("*.ledger")}
        return {worker: pid for worker, pid in named.items() if pid in pids}

    def events(self, name: str) -> list[Event]:
        return [event for program in self._programs for event in program.events(name)]

    def destroy(self) -> None:
        for program in self._programs:
            program.destroy()
        if self.network is not None:
            self.network.close()


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
