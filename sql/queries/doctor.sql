-- name: find_filled_defaults
-- Default partitions that contain rows, because the rows' week had no partition.
select 'email_log_default' where exists (select from dispatcher.email_log_default)
union all
select 'email_content_default' where exists (select from dispatcher.email_content_default)
union all
select 'email_attachment_default' where exists (select from dispatcher.email_attachment_default)
union all
select 'email_attempt_default' where exists (select from dispatcher.email_attempt_default);

-- name: find_other_recipients
-- The hosts that were seen in the last hour and allow other recipients than a host with this digest.
select distinct host
from dispatcher.host_presence
where seen_at > clock_timestamp() - interval '1 hour'
    and coalesce(recipients, '') <> %(recipients)s
order by host;

-- name: find_hash_readers
-- The roles to which an earlier release granted the right to read the hashes of payloads. No row: `dispatcher topology
-- grants --exact` has revoked it, or no such role exists.
select acl.grantee::regrole::text
from pg_attribute, aclexplode(attacl) as acl
where attrelid = 'dispatcher.email_idempotency'::regclass
    and attname = 'payload_hash'
    and acl.privilege_type = 'SELECT'
order by 1;

-- name: sample_pending
-- The oldest pending emails, with the fields that decide whether a provider can send them; no bodies, no attachments.
select
    e.email_id, e.created_at, c.sender, c.recipients, '', null, null, c.template_id, null, c.headers, null, e.channel
from (
    select email_id, created_at, channel
    from dispatcher.email_log
    where status = 'pending'
    order by email_id
    limit %(limit)s
) as e
join dispatcher.email_content as c on c.email_id = e.email_id;

-- name: find_oldest_transaction
-- The session, prepared transaction, replication slot or standby that keeps the oldest row versions of this database, if
-- it is open for more than older_seconds, or, if that is not known, if more than 200,000 transactions have begun since.
-- PostgreSQL may not show when the transaction of a different user began. Autovacuum keeps no row versions.
select kind, name, user_name, application, since, transactions
from (
    select
        'session' as kind, pid::text as name, usename::text as user_name,
        coalesce(nullif(application_name, ''), backend_type) as application, xact_start as since,
        greatest(age(backend_xmin), age(backend_xid)) as transactions
    from pg_stat_activity
    where datname = current_database()
        and pid <> pg_backend_pid()
        and backend_type is distinct from 'autovacuum worker'
    union all
    select 'prepared transaction', gid, owner::text, null, prepared, age(transaction)
    from pg_prepared_xacts
    where database = current_database()
    union all
    select 'replication slot', slot_name::text, null, plugin::text, null, age(xmin)
    from pg_replication_slots
    union all
    select 'standby', coalesce(nullif(application_name, ''), pid::text), usename::text, null, null, age(backend_xmin)
    from pg_stat_replication
) as holder
where transactions is not null
    and case
        when since is not null then since < clock_timestamp() - %(older_seconds)s * interval '1 second'
        else transactions > 200000
    end
order by transactions desc, since
limit 1;

-- name: find_collation_versions
-- The version of the database's collation when its indexes were built, and now. Some collations have none.
select
    coalesce(datcollversion, 'unknown'),
    case
        when datcollversion is null then 'unknown'
        else coalesce(pg_database_collation_actual_version(oid), 'unknown')
    end,
    quote_ident(datname::text)
from pg_database
where datname = current_database();
