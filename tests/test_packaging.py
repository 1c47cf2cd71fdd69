"""What the wheel holds, every package and every statement that they execute; and what is shipped beside it."""

from __future__ import annotations

import configparser
from pathlib import Path

from dispatcher.cli.config import environment_file
from dispatcher.cli.env_file import parse
from dispatcher.cli.environment import known_variables

ROOT = Path(__file__).parent.parent


def test_every_package_of_the_tree_ships() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())

    present = {".".join(module.parent.relative_to(ROOT).parts) for module in (ROOT / "dispatcher").rglob("__init__.py")}
    statements = {
        ".".join(("dispatcher", *path.parent.relative_to(ROOT).parts)) for path in ROOT.glob("sql/**/__init__.py")
    }

    assert listed == present | statements


def test_every_folder_of_statements_ships_with_its_files() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    shipped = {name for name, globs in setup["options.package_data"].items() if "*.sql" in globs}

    holding = {".".join(("dispatcher", *path.parent.relative_to(ROOT).parts)) for path in ROOT.glob("sql/**/*.sql")}

    assert shipped == holding


def test_the_environment_file_explains_every_setting() -> None:
    # Where this fails: dispatcher config --example > deploy/dispatcher.env
    assert (ROOT / "deploy" / "dispatcher.env").read_text() == environment_file().rstrip() + "\n"


def test_the_files_that_we_ship_start_the_api_as_another_user_and_without_the_secrets_of_providers() -> None:
    units = {
        name: (ROOT / "deploy" / f"{name}.service").read_text() for name in ("email-dispatcher", "email-dispatcher-api")
    }
    programs = configparser.RawConfigParser()
    programs.read(ROOT / "deploy" / "supervisord.conf")
    named = parse(
        ROOT, (ROOT / "deploy" / "dispatcher-api.env").read_text().replace("#DISPATCHER", "DISPATCHER")
    ).keys()

    users = {programs[f"program:{name}"]["user"] for name in ("dispatcher", "dispatcher-api")}
    assert users == {"email-dispatcher", "email-dispatcher-api"}
    assert all(f"\nUser={name}\n" in unit for name, unit in units.items())
    assert "/etc/email-dispatcher/dispatcher.env" not in units["email-dispatcher-api"]
    assert not [name for name in named if name.startswith(("DISPATCHER_SMTP", "SENDGRID", "DISPATCHER_SES", "AWS"))]
    assert named <= known_variables()
