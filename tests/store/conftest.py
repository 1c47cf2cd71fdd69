"""What tests of the store may ask for."""

from tests.store.fixtures import books, kept_database_url, other_store, pool, store, tables_url

__all__ = ["books", "kept_database_url", "other_store", "pool", "store", "tables_url"]
