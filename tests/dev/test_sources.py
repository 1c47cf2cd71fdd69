"""The servers' programs are found on the system, or downloaded."""

from __future__ import annotations

import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from urllib.parse import unquote, urlsplit

import pytest

from dispatcher.dev import cache, debian, ports, postgres, rabbitmq, servers
from dispatcher.errors import ServerUnavailable

SIMULATION = """\
Reading package lists...
The following NEW packages will be installed:
  erlang-base rabbitmq-server
Inst libsctp1 [1.0.18] (1.0.19+dfsg-2 Debian:12.11/stable [amd64])
Inst erlang-base (1:25.2.3+dfsg-1+deb12u4 Debian:12.11/stable [amd64])
Inst rabbitmq-server (3.10.8-1.1+deb12u1 Debian:12.11/stable, Debian-Security:12/stable-security [all])
Conf erlang-base (1:25.2.3+dfsg-1+deb12u4 Debian:12.11/stable [amd64])
"""
STATUS = """\
Package: erlang-base
Status: install ok installed

Package: libssl3
Status: install ok installed
Depends: erlang-base

Package: rabbitmq-server
Status: install ok installed
"""


def test_package_names_are_read_from_a_simulated_installation() -> None:
    assert debian.to_install(SIMULATION) == ["libsctp1", "erlang-base", "rabbitmq-server"]


def test_wanted_packages_count_as_missing_even_if_they_are_installed() -> None:
    left = debian.without(rabbitmq.ERLANG_PACKAGES, STATUS)

    assert left == "Package: libssl3\nStatus: install ok installed\nDepends: erlang-base\n\n"


def test_chosen_ports_are_different_and_free() -> None:
    chosen = ports.choose(20)

    assert len(set(chosen)) == 20
    assert all(map(ports.is_free, chosen))


def test_ports_of_the_last_start_are_kept_if_they_are_free() -> None:
    earlier = ports.choose(2)

    assert ports.keep_or_choose(earlier, 2) == earlier


def test_all_ports_are_new_if_one_of_the_last_start_is_in_use(servers: servers.Servers) -> None:
    taken = urlsplit(servers.amqp_url).port
    free = ports.choose(1)[0]
    assert taken is not None

    assert taken not in ports.keep_or_choose([free, taken], 2)


def test_the_vhost_in_an_amqp_url_is_percent_encoded() -> None:
    access = rabbitmq.RabbitAccess("p-w_1", "cookie", "node@localhost", 1, 2, 3, 4)

    assert access.amqp_url == "amqp://dispatcher:p-w_1@127.0.0.1:1/%2F"
    assert unquote(urlsplit(access.amqp_url).path[1:]) == "/"


@pytest.mark.parametrize(
    ("amqp_url", "management_url"),
    [
        ("amqp://u:p%40s@mq.internal:5672/%2F", "http://u:p%40s@mq.internal:15672"),
        ("amqps://u:p@mq.internal/", "https://u:p@mq.internal:15671"),
        ("amqp://[::1]:5673", "http://guest:guest@[::1]:15672"),
    ],
)
def test_the_management_url_is_guessed_from_the_amqp_url(amqp_url: str, management_url: str) -> None:
    assert servers.guess_management_url(amqp_url) == management_url


def test_a_wrapper_around_the_start_script_is_not_used(tmp_path: Path) -> None:
    real, links, wrapper = tmp_path / "rabbitmq_server-4.0.5", tmp_path / "bin", tmp_path / "sbin"
    for folder in (real, links, wrapper):
        folder.mkdir()
    (real / "rabbitmq-server").touch()
    (real / "rabbitmq-defaults").touch()
    (links / "rabbitmq-server").symlink_to(real / "rabbitmq-server")
    (wrapper / "rabbitmq-server").touch()

    assert rabbitmq.real_scripts(links) == real
    assert rabbitmq.real_scripts(wrapper) is None


def test_erlangs_start_script_gets_a_root_with_spaces_and_quotes(tmp_path: Path) -> None:
    root = tmp_path / "it's here"
    script = tmp_path / "erl"
    script.write_text('if true; then\n    ROOTDIR=/usr/lib/erlang\nfi\nBINDIR="$ROOTDIR/bin"\necho "$BINDIR"\n')

    rabbitmq.patch_root(script, root)

    answer = subprocess.run(["/bin/sh", script], capture_output=True, text=True, check=True)
    assert answer.stdout == f"{root}/bin\n"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test, which is empty."""
    monkeypatch.setenv("DISPATCHER_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_an_interrupted_build_is_repeated_and_leaves_no_files(cached: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    def whole(folder: Path) -> None:
        (folder / "all").touch()

    with pytest.raises(KeyboardInterrupt):
        cache.obtain("thing", interrupted)
    (cached / ".thing.partial-of-a-killed-run").mkdir()

    assert [path.name for path in cache.obtain("thing", whole).iterdir()] == ["all"]
    assert sorted(path.name for path in cached.iterdir()) == [".thing.lock", "thing"]


def test_of_two_concurrent_runs_one_builds(cached: Path) -> None:
    built: list[Path] = []
    together = Barrier(2)

    def run() -> Path:
        together.wait()
        return cache.obtain("thing", built.append)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(run), pool.submit(run)

    assert first.result() == second.result() == cached / "thing"
    assert len(built) == 1


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"DISPATCHER_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/email-dispatcher"),
        ({"HOME": "/h"}, "/h/.cache/email-dispatcher"),
    ],
)
def test_the_cache_folder_follows_the_environment(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPATCHER_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache.folder() == Path(folder)


def test_the_error_of_an_unwritable_cache_folder_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISPATCHER_CACHE_DIR", str(tmp_path / "file" / "cache"))

    with pytest.raises(ServerUnavailable, match="DISPATCHER_CACHE_DIR"):
        cache.obtain("thing", lambda _: None)


def test_without_apt_the_error_says_what_to_install_or_to_set(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_DEV_RABBITMQ", "debian")
    monkeypatch.setenv("PATH", str(cached))

    with pytest.raises(ServerUnavailable) as caught:
        rabbitmq.find(lambda _: None)

    assert "apt-get" in caught.value.message
    for words in ("rabbitmq-server", "DISPATCHER_AMQP_URL"):
        assert words in str(caught.value.remedy)


def test_an_unknown_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_DEV_POSTGRES", "docker")

    with pytest.raises(ServerUnavailable, match="'docker'"):
        postgres.find(lambda _: None)


def test_only_this_user_may_read_the_secrets(servers: servers.Servers) -> None:
    readable = [
        path.name
        for path in servers.folder.rglob("*")
        if path.suffix in {".json", ".conf", ".cookie"}
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ]

    assert readable == []
    assert not servers.folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
