-- Unique text keys are compared byte by byte (collation "C"). The order of every other collation may change with the
-- operating system's C library. Then an index no longer finds some of its rows, and a repeated message key would create a
-- second email. See docs/decisions/0063-keys-in-bytes.md. This migration changes the tables that may be large.
--
-- `init` builds these indexes before the migration, while other sessions write. After the change of a column's collation,
-- PostgreSQL keeps an index that has the new collation already. So no statement below reads a table.
create unique index if not exists email_idempotency_bytes on email_idempotency (
    tenant_id collate "C", message_key collate "C"
);
create unique index if not exists suppression_bytes on suppression (tenant_id collate "C", address_hash);
create unique index if not exists inbound_message_bytes on inbound_message (message_id collate "C");
create unique index if not exists email_hourly_bytes on email_hourly (
    hour, provider collate "C", outcome collate "C", slot collate "C"
);

alter table email_idempotency drop constraint email_idempotency_pkey;
alter table email_idempotency
    alter column tenant_id type text collate "C",
    alter column message_key type text collate "C";
alter table email_idempotency add constraint email_idempotency_pkey primary key using index email_idempotency_bytes;

alter table suppression drop constraint suppression_once;
alter table suppression alter column tenant_id type text collate "C";
alter table suppression add constraint suppression_once unique using index suppression_bytes;

alter table inbound_message drop constraint inbound_message_pkey;
alter table inbound_message alter column message_id type text collate "C";
alter table inbound_message add constraint inbound_message_pkey primary key using index inbound_message_bytes;

alter table email_hourly drop constraint email_hourly_pkey;
alter table email_hourly
    alter column provider type text collate "C",
    alter column outcome type text collate "C",
    alter column slot type text collate "C";
alter table email_hourly add constraint email_hourly_pkey primary key using index email_hourly_bytes;
