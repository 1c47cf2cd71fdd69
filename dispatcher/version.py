"""The version of the package, which setup.cfg reads."""

VERSION = "0.1.0"
