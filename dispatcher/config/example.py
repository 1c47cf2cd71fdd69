"""The environment file that explains every setting, to be filled in; deploy/dispatcher.env is this."""

from __future__ import annotations

from typing import Final

from dispatcher.config import Setting, every_setting

_HEAD: Final = """\
# Email Dispatcher: the settings of one host. A line counts once the # before its name is gone; what stands there is the
# default. `dispatcher config` shows what a host has, `dispatcher doctor` whether it works.
# Every command reads this file if --env-file or DISPATCHER_ENV_FILE names it. A line here overrides the same variable
# of the environment. Nothing is expanded: a $ is a $. Put quotes around a value that has quotes, a line break, or a
# space before a #.
"""


def environment_file() -> str:
    """Every setting, commented out and explained; deploy/dispatcher.env is this."""
    return _HEAD + "".join(f"\n{_entry(each)}" for each in every_setting())


def _entry(declared: Setting) -> str:
    about = declared.about + (f" Or {declared.variable}_FILE." if declared.secret else "")
    return f"# {about}\n#{declared.variable}={declared.default or ''}\n"
