from tests.acceptance.conftest import host

__all__ = ["host"]
