"""The packages contain every file and work with each extra alone; the checkout contains the files for a deployment, and
generated files that are up to date. `test_installed` installs the packages."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dispatcher.cli.env_file import parse
from dispatcher.cli.environment import known_variables
from dispatcher.cli.main import COMMANDS
from dispatcher.config import BUILT_IN
from dispatcher.dev import generate
from dispatcher.version import VERSION

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg")
    return found


def packages(pattern: str, *prefix: str) -> set[str]:
    return {".".join((*prefix, *path.parent.relative_to(ROOT).parts)) for path in ROOT.glob(pattern)}


def test_the_wheel_has_every_package_and_every_sql_file(setup: configparser.ConfigParser) -> None:
    shipped = {name for name, globs in setup["options.package_data"].items() if "*.sql" in globs}

    assert set(setup["options"]["packages"].split()) == (
        packages("dispatcher/**/__init__.py") | packages("sql/**/__init__.py", "dispatcher")
    )
    assert shipped == packages("sql/**/*.sql", "dispatcher")


def copy_checkout(to: Path) -> Path:
    """A clone of this checkout, in which changes of tracked files are committed."""
    # Without this, git takes a file with another owner or time for a changed one, and then finds no change.
    subprocess.run(["git", "update-index", "-q", "--refresh"], cwd=ROOT, check=False)
    stash = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com", "stash", "create"]
    changes = subprocess.run(stash, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, to], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", changes or "HEAD"], cwd=to, check=True)
    return to


def run_packages(checkout: Path, command: str, **changes: Any) -> None:
    """`./run build` or `./run deb`, with the packages of this environment."""
    words = [sys.executable, "deploy/packages.py", command]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False, **changes)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = copy_checkout(tmp_path_factory.mktemp("checkout") / "project")
    run_packages(checkout, "build")
    with zipfile.ZipFile(next(checkout.glob("dist/*.whl"))) as wheel:
        wheel.extractall(checkout / "unpacked")
    return checkout


def test_the_wheel_has_every_file_that_the_program_or_a_host_needs(built: Path) -> None:
    data = built / "unpacked" / f"email_dispatcher-{VERSION}.data/data/share/email-dispatcher"
    needed = [path for path in (built / "dispatcher").rglob("*") if path.is_file()]
    needed += [built / "dispatcher" / path.relative_to(built) for path in (built / "sql").rglob("*.*")]
    there = {path.relative_to(built / "unpacked") for path in (built / "unpacked").rglob("*")}

    assert [path for path in needed if path.relative_to(built) not in there] == []
    assert {path.name for path in data.iterdir()} == {
        path.name
        for path in (built / "deploy").iterdir()
        if path.suffix in {".service", ".env", ".conf", ".yml", ".json"}
    }
    assert Path(f"email_dispatcher-{VERSION}.dist-info/licenses/LICENSE") in there


@pytest.mark.slow  # builds twice more; `built` shows on each push that the packages can be built
def test_another_folder_time_and_umask_make_the_same_bytes_and_the_sdist_makes_the_same_wheel(
    built: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(built, tmp_path / "elsewhere", copy_function=shutil.copy)
    run_packages(other, "build", umask=0o077, env={**os.environ, "TZ": "Asia/Tokyo"})
    sdist, wheel = sorted(built.glob("dist/*"), reverse=True)

    assert {path.name: path.read_bytes() for path in other.glob("dist/*")} == {
        path.name: path.read_bytes() for path in (sdist, wheel)
    }
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    seconds = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=built, check=True, capture_output=True).stdout
    subprocess.run(
        [sys.executable, "-c", "import setuptools.build_meta as backend; backend.build_wheel('.')"],
        cwd=tmp_path / f"email_dispatcher-{VERSION}", env={**os.environ, "SOURCE_DATE_EPOCH": seconds.decode().strip()},
        check=True, capture_output=True,
    )  # fmt: skip
    (again,) = tmp_path.glob(f"email_dispatcher-{VERSION}/*.whl")
    assert again.read_bytes() == wheel.read_bytes()


NEEDS: Final = {
    "dispatcher.api.ops_page.openid": "oidc",
    "dispatcher.api.": "api",
    "dispatcher.contrib.django": "test",
    "dispatcher.dev.conformance": "test",
    "dispatcher.dev.testing": "test",
    "dispatcher.smtp_door.": "smtp",
    "dispatcher.telemetry.spans": "otel",
}
"""Modules that need an extra. All others work without any extra."""
IMPORTS: Final = """
import dispatcher, json, pkgutil, sys
absent = set(json.load(sys.stdin))
class Finder:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Finder)
for each in pkgutil.walk_packages(dispatcher.__path__, "dispatcher."):
    try:
        each.name.endswith("__main__") or __import__(each.name)
    except ModuleNotFoundError as error:
        print(each.name)
"""


@pytest.mark.parametrize("extra", ["runtime", "api", "dns", "oidc", "otel", "smtp"])
def test_the_wheels_modules_import_with_the_packages_of_one_extra_alone(built: Path, extra: str) -> None:
    """Imports the wheel's modules while the packages that `requirements/EXTRA.txt` lacks cannot be imported."""
    present = {*pins(extra), "email-dispatcher"}
    absent = [
        name for name, owners in packages_distributions().items() if not present & set(map(canonicalize_name, owners))
    ]
    extras = {extra, "api"} if extra == "oidc" else {extra}

    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS], env={**os.environ, "PYTHONPATH": str(built / "unpacked")},
        input=json.dumps(absent), capture_output=True, text=True, check=True,
    )  # fmt: skip

    needed = {
        name: next((NEEDS[each] for each in NEEDS if name.startswith(each)), None) for name in ended.stdout.split()
    }
    assert {name: need for name, need in needed.items() if need is None or need in extras} == {}
    assert "test" in needed.values()  # the packages of other extras are absent indeed


def test_the_man_page_has_every_command_and_groff_can_read_it() -> None:
    made = subprocess.run(
        [sys.executable, "deploy/manual.py", "0"], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert [name for name in COMMANDS if f'\n.SS "dispatcher {name}"\n' not in made.stdout] == []
    assert '\n.SS "dispatcher dlq replay"\n' in made.stdout
    assert r"\-\-error\-type" in made.stdout
    if groff := shutil.which("groff"):
        read = subprocess.run(
            [groff, "-man", "-Kutf8", "-Tutf8", "-ww", "-z"],
            input=made.stdout,
            capture_output=True,
            text=True,
            check=True,
        )
        assert read.stderr == ""


def test_the_metadata_have_only_forms_that_the_setuptools_of_debian_12_knows(setup: configparser.ConfigParser) -> None:
    """setuptools 66 refuses a license that is a text; from version 77, setuptools warns about a license that is a
    table. Both versions accept a license in setup.cfg."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert document["build-system"]["requires"] == ["setuptools>=66"]
    assert not {"license", "license-files"} & document["project"].keys()
    assert set(document["project"]["dynamic"]) <= setup["metadata"].keys()


EXPOSED = ("email-dispatcher-api", "email-dispatcher-smtp")
"""The units of programs that other hosts can reach."""


def test_the_deployment_files_start_the_api_as_another_user_without_provider_secrets() -> None:
    units = {name: (ROOT / "deploy" / f"{name}.service").read_text() for name in ("email-dispatcher", *EXPOSED)}
    programs = configparser.RawConfigParser()
    programs.read(ROOT / "deploy" / "supervisord.conf")
    named = parse(
        ROOT, (ROOT / "deploy" / "dispatcher-api.env").read_text().replace("#DISPATCHER", "DISPATCHER")
    ).keys()

    users = {programs[f"program:{name}"]["user"] for name in ("dispatcher", "dispatcher-api", "dispatcher-smtp")}
    assert users == {"email-dispatcher", "email-dispatcher-api"}
    assert "\nUser=email-dispatcher\n" in units["email-dispatcher"]
    for name in EXPOSED:
        assert "\nUser=email-dispatcher-api\n" in units[name]
        assert "\nInaccessiblePaths=-/etc/email-dispatcher/dispatcher.env\n" in units[name]
        assert "--env-file /etc/email-dispatcher/dispatcher-api.env" in units[name]
    assert not [name for name in named if name.startswith(("DISPATCHER_SMTP", "SENDGRID", "DISPATCHER_SES", "AWS"))]
    assert named <= known_variables(BUILT_IN)


SANDBOX = {
    "CapabilityBoundingSet=", "LimitCORE=0", "LockPersonality=yes", "MemoryDenyWriteExecute=yes", "NoNewPrivileges=yes",
    "PrivateDevices=yes", "PrivateTmp=yes", "PrivateUsers=yes", "ProtectHome=yes", "ProtectKernelTunables=yes",
    "ProtectProc=invisible", "ProtectSystem=strict", "RestrictNamespaces=yes", "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native", "SystemCallFilter=@system-service", "UMask=0077",
}  # fmt: skip


@pytest.mark.parametrize("name", ["email-dispatcher", *EXPOSED])
def test_a_systemd_unit_is_confined_to_its_folder_its_processes_and_the_network(name: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / f"{name}.service").read_text()
    unit = tmp_path / f"{name}.service"
    unit.write_text(text.replace("/opt/email-dispatcher/bin/dispatcher", f"{sys.executable} -m dispatcher"))

    assert set(text.splitlines()) >= SANDBOX
    assert name in EXPOSED or "\nProcSubset=pid" not in text  # a ledger needs the host's boot id from /proc/sys
    if analyze := shutil.which("systemd-analyze"):
        for words in (["verify"], ["security", "--offline=true", "--threshold=25", "--no-pager"]):
            done = subprocess.run([analyze, *words, str(unit)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def pins(name: str) -> dict[str, str]:
    """The versions in a file of requirements, by package. Each package must have a hash."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    found: list[tuple[str, str]] = re.findall(
        r"^([a-z0-9._-]+)(?:\[[a-z0-9,-]+\])?==(\S+).*\\\n    --hash=sha256:", text, re.MULTILINE
    )
    assert len(found) == len(re.findall(r"^\w", text, re.MULTILINE))
    return dict(found)


def requirements_of(extra: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = list(map(Requirement, [*project["dependencies"], *project["optional-dependencies"].get(extra, ())]))
    nested = [requirement for each in listed if each.name == project["name"] for requirement in each.extras]
    plain = [each for each in listed if each.name != project["name"]]
    return [*plain, *(one for name in nested for one in requirements_of(name))]


@pytest.mark.parametrize("extra", ["runtime", "api", "deploy", "oidc", "otel"])
def test_a_host_installs_each_extra_from_pins_with_hashes_that_are_up_to_date(extra: str) -> None:
    """`./run lock` writes the files. The versions are those that the tests use."""
    tested, pinned = pins("dev"), pins(extra)

    missing = [each for each in requirements_of(extra) if each.name not in pinned]
    outside = [each for each in requirements_of(extra) if pinned.get(each.name, "") not in each.specifier]
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert (missing, outside) == ([], [])
    assert {name: tested.get(name) for name in pinned} == pinned
    assert f"`requirements/{extra}.txt`" in page
    assert "pip install --require-hashes -r requirements/" in page


def test_uv_is_pinned_by_hash() -> None:
    pinned = (ROOT / "requirements" / "uv.txt").read_text()

    assert "--require-hashes -r requirements/uv.txt" in (ROOT / "run").read_text()
    assert re.search(r"^uv==\S+ \\\n    --hash=sha256:", pinned, re.MULTILINE)


@pytest.mark.parametrize("path", generate.generated(), ids=lambda path: path.name)
def test_a_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text() == generate.generated()[path], "run: ./run generate"
