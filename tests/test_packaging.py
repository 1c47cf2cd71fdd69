"""What the wheel holds, every package and every statement that they execute; and what is shipped beside it."""

from __future__ import annotations

import configparser
from pathlib import Path

from dispatcher.cli.config import environment_file

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
