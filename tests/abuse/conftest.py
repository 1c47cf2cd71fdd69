"""Fixtures for the API under attack."""

from tests.acceptance.conftest import host

__all__ = ["host"]
