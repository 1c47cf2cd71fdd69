-- A message key is completed by an update, and a seventh of these find no room on their page and leave a dead row. By
-- default autovacuum waits until a fifth of a table is dead; this table only grows, so it would come ever more seldom.
alter table email_idempotency set (autovacuum_vacuum_scale_factor = 0.02);
