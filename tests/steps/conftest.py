"""A separate host for each test."""

from tests.acceptance.conftest import host

__all__ = ["host"]
