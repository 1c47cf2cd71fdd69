"""A headless Chromium: Debian's package, unpacked without root into the cache folder; see decision 0050."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, sync_playwright

from dispatcher.dev import cache, debian

PACKAGE: Final = "chromium-headless-shell"
MORE_PACKAGES: Final = ("fonts-inter", "fonts-dejavu-core", "libatomic1")
"""Fonts, and what Playwright's own program needs."""
REMEDY: Final = "Check the network. The browser tests need Debian's package chromium-headless-shell."
ARGUMENTS: Final = (
    "--disable-dev-shm-usage",  # /dev/shm of a container is often too small
    "--disable-gpu",
    "--font-render-hinting=none",
)
UNNEEDED: Final = (
    "usr/lib/chromium/lib[Vv]*",
    "usr/lib/*/dri/*",
    "usr/lib/*/libLLVM*",
    "usr/lib/*/libgallium*",
    "usr/lib/*/libz3*",
)
"""Graphics drivers: two thirds of the files, and unused without a screen."""
LIBRARY_FOLDERS: Final = ("pulseaudio", "blas", "lapack")
"""Folders below the libraries' folder, in which Debian's linker would search by its own configuration."""

FONTS: Final = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir>{folder}/usr/share/fonts</dir><dir>/usr/share/fonts</dir>
  <cachedir>{folder}/fontconfig</cachedir>
  <alias binding="strong"><family>system-ui</family><prefer><family>Inter</family></prefer></alias>
  <alias binding="strong"><family>sans-serif</family><prefer><family>Inter</family></prefer></alias>
  <alias binding="strong"><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


def find() -> tuple[Path, dict[str, str]]:
    """The program in the cache folder, which is downloaded first if it is not there; and the environment variables with
    which the program finds its libraries and fonts."""

    def build(folder: Path) -> None:
        print("downloading Chromium from Debian (100 MB)")
        even_if_installed = r"chromium\S*|fonts-inter"
        debian.fetch(
            PACKAGE, folder, also=MORE_PACKAGES, even_if_installed=even_if_installed, remedy=REMEDY, progress=print
        )
        for path in (path for pattern in UNNEEDED for path in (folder / "usr/lib").glob(pattern)):
            path.unlink()

    root = cache.obtain(f"chromium-{debian.system()}", build)
    fonts = root / "fonts.conf"
    if not fonts.exists():
        fonts.write_text(FONTS.format(folder=root))
    folders = debian.library_folders(root)
    folders += [sub for folder in folders for name in LIBRARY_FOLDERS if (sub := folder / name).is_dir()]
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders)), "FONTCONFIG_FILE": str(fonts)}
    return root / "usr/lib/chromium/chromium-headless-shell", environment


@contextmanager
def launched() -> Iterator[Browser]:
    """A running browser, which exits at the end of the block.

    Chromium's sandbox is off, because it needs root or user namespaces. The browser opens only pages of this machine.
    """
    program, environment = find()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in environment.items():
            patch.setenv(name, value)
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS), chromium_sandbox=False)
        patch.undo()
        try:
            yield browser
        finally:
            browser.close()
