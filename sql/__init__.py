"""Everything that we say to PostgreSQL: migrations and named queries; ships as `dispatcher.sql`."""
