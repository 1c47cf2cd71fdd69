-- name: find_filled_defaults
-- Default partitions that contain rows, because the rows' week had no partition. No row: all partitions were created in
-- time.
select 'email_log_default'
where exists (select 1 from dispatcher.email_log_default)
union all
select 'email_content_default'
where exists (select 1 from dispatcher.email_content_default)
union all
select 'email_attachment_default'
where exists (select 1 from dispatcher.email_attachment_default)
union all
select 'email_attempt_default'
where exists (select 1 from dispatcher.email_attempt_default);

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
