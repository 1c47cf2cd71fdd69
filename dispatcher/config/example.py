"""The environment file that explains every setting: deploy/dispatcher.env, printed by `dispatcher config --example`."""

from __future__ import annotations

from typing import Final

from dispatcher.config import Setting, every_setting

_HEAD: Final = """\
# Email Dispatcher: the settings of one host. To set one, remove the # before its name. The values below are the
# defaults. `dispatcher config` prints the settings in effect, `dispatcher doctor` checks whether they work.
# Every command reads this file if --env-file or DISPATCHER_ENV_FILE has its path. A line here overrides the same
# variable in the environment. A $ in a value has no special meaning. Put quotes around a value that contains quotes, a
# line break, or a space before a #.
"""


def environment_file() -> str:
    """The text of deploy/dispatcher.env: every setting, commented out and explained."""
    return _HEAD + "".join(f"\n{_entry(each)}" for each in every_setting())


def _entry(declared: Setting) -> str:
    about = declared.about + (f" Or {declared.variable}_FILE." if declared.secret else "")
    return f"# {about}\n#{declared.variable}={declared.default or ''}\n"
