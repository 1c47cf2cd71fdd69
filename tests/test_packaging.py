"""The wheel contains every package and every SQL file; the checkout contains the files for a deployment, and generated
files that are up to date."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dispatcher.cli.env_file import parse
from dispatcher.cli.environment import known_variables
from dispatcher.config import BUILT_IN
from dispatcher.dev import generate

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
    units = {
        name: (ROOT / "deploy" / f"{name}.service").read_text() for name in ("email-dispatcher", *EXPOSED)
    }
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
