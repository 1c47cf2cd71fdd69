"""Django's own tests of mail pass against the backend, or are about something that the backend does not have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import django
import pytest

from dispatcher.dev import cache

ROOT = Path(__file__).parents[2]


def source() -> Path:
    """The tests in Django's source distribution. Its hash is in requirements/dev.txt, beside that of the wheel."""
    version = django.get_version()

    def fetch(folder: Path) -> None:
        pinned = (ROOT / "requirements" / "dev.txt").read_text()
        pattern = rf"(?m)^(django=={version}) .*\\\n((?:    --hash=\S+(?: \\)?\n)+)"
        ((line, hashes),) = re.findall(pattern, pinned)
        (folder / "requirement.txt").write_text(f"{line} \\\n{hashes}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        words = [
            "--no-binary=django",
            "--require-hashes",
            f"--dest={folder}",
            f"--requirement={folder}/requirement.txt",
        ]
        subprocess.run([*command, *words], check=True)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        archive.unlink()

    return cache.obtain(f"django-tests-{version}", fetch) / f"django-{version}" / "tests"


NO_CONNECTION = "about the connection to an SMTP server, which is the dispatcher's"
RENDERING = "about how Django writes MIME: the dispatcher chooses its own encodings, and ends the last line of a text"
NOT_APPLICABLE = {
    r"test_(email_)?(auth|disabled_auth|host|port|server|smtp|ssl|tls|timeout|connection_timeout)\w+": NO_CONNECTION,
    r"test_(direct_construction|email_msg|ignores_settings|prep_|reopen|serialized)\w+": NO_CONNECTION,
    r"test_send_messages_after_open_failed": NO_CONNECTION,
    r"test_html_(send_mail|mail_admins|mail_managers)|test_message_cc_header": RENDERING,
    r"test_send_(long_lines|unicode|verbose_name)": RENDERING,
    r"test_recipient_without_domain|test_lazy_addresses": "an address without a domain, which no provider accepts",
    r"test_rejects_non_ascii_local_part": "the dispatcher sends to such addresses, by SMTPUTF8",
    r"test_nonascii_as_string_with_ascii_charset": "counts the renderings, to which the comparison adds its own",
}


@pytest.mark.slow  # downloads 11 MB once, and runs Django's tests, for a minute on a busy machine
def test_djangos_tests_of_mail_pass_or_do_not_apply(own_database_url: str) -> None:
    command = [sys.executable, "-m", "tests.contrib.django_suite", own_database_url, str(source())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    left_out = {
        name: why for pattern, why in NOT_APPLICABLE.items() for name in found["failed"] if re.fullmatch(pattern, name)
    }
    print(f"Django {django.get_version()}: {found['counts']}, {len(left_out)} not applicable")
    print("\n".join(f"  {name}: {why}" for name, why in left_out.items()))

    assert {name: outcome for name, outcome in found["failed"].items() if name not in left_out} == {}
    assert found["differences"] == []
    assert found["counts"]["run"] > 110
