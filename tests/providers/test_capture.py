"""The capture adapter writes emails into a Maildir, and reports a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dispatcher.domain.outcome import Accepted
from dispatcher.errors import ProviderFault
from dispatcher.providers.capture import CaptureProvider
from tests.providers.emails import Sending, an_email, send


async def test_the_maildir_is_created_at_the_first_use_and_the_files_name_is_the_message_id(tmp_path: Path) -> None:
    email, folder = an_email(), tmp_path / "a" / "maildir"
    provider = CaptureProvider(folder)
    assert not folder.exists()

    sending = await send(provider, email)

    assert {path.name for path in folder.iterdir()} == {"tmp", "new", "cur"}
    assert [path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())] == [0, 0, 0, 0]
    (path,) = (folder / "new").iterdir()
    assert path.name.startswith(f"{email.email_id}.")
    assert path.suffix == ".eml"
    assert sending.outcome == Accepted(path.name)


async def test_the_file_is_complete_and_still_hidden_at_mark_on_wire(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def leaving() -> None:
        seen.append((len(list((tmp_path / "tmp").iterdir())), len(list((tmp_path / "new").iterdir()))))

    await CaptureProvider(tmp_path).send(an_email(), Sending(leave=leaving))

    assert seen == [(1, 0)]
    assert not list((tmp_path / "tmp").iterdir())


async def test_an_impossible_or_deleted_folder_is_a_fault_until_it_is_corrected(tmp_path: Path) -> None:
    folder = tmp_path / "maildir"
    folder.write_text("in the way")
    provider = CaptureProvider(folder)

    with pytest.raises(ProviderFault, match="cannot be written"):
        await send(provider, an_email())
    with pytest.raises(ProviderFault):
        await provider.check()
    folder.unlink()
    assert isinstance((await send(provider, an_email())).outcome, Accepted)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ProviderFault):
        await send(provider, an_email())
    assert isinstance((await send(provider, an_email())).outcome, Accepted)


async def test_a_full_disk_is_a_fault_that_leaves_nothing_behind_and_so_does_check(tmp_path: Path) -> None:
    provider = CaptureProvider(tmp_path)
    assert str(tmp_path) in await provider.check()

    with no_room(octets=1000), pytest.raises(ProviderFault, match="cannot be written"):
        await send(provider, an_email(text="x" * 5000))

    assert not [path for part in ("tmp", "new", "cur") for path in (tmp_path / part).iterdir()]


@contextmanager
def no_room(octets: int) -> Iterator[None]:
    """Within the block, no file can grow beyond this many octets, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (octets, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
