-- name: find_wait
-- The facts that show why a pending, waiting or sending email waits. To count the due emails ahead of it, the statement
-- reads at most most_ahead pending emails, due or not. Zero rows: the email has a different status.
select
    clock_timestamp(),
    e.status,
    e.lease_token > 0,
    e.publish_due_at,
    e.locked_until,
    e.error_type,
    exists (
        select from pg_stat_activity
        where datname = current_database()
            and application_name = e.locked_by
            and has_table_privilege(usesysid, 'dispatcher.email_log', 'update')
    ),
    dispatcher.named_lock_holder('relay') is not null,
    (
        select count(distinct application_name)
        from pg_stat_activity
        where datname = current_database()
            and application_name ~ ':w[0-9]+:[0-9]+:[0-9a-f]+$'
            and has_table_privilege(usesysid, 'dispatcher.email_log', 'update')
    ),
    (
        select count(*)
        from (
            select other.publish_due_at
            from dispatcher.email_log as other
            where other.status = 'pending'
                and other.email_id < e.email_id
            limit %(most_ahead)s
        ) as ahead
        where coalesce(ahead.publish_due_at <= clock_timestamp(), true)
    ),
    e.wait_until,
    e.wait_reason,
    e.attempt_count,
    e.provider,
    e.wait_domain,
    d.per_second,
    d.concurrent
from dispatcher.email_log as e
left join dispatcher.domain_limit as d on d.domain = e.wait_domain
where e.email_id = %(email_id)s
    and e.status in ('pending', 'waiting', 'sending');

-- name: may_lock
-- Whether this role has the rights to execute find_locked.
select
    has_table_privilege('dispatcher.email_log', 'update')
    and has_table_privilege('dispatcher.email_idempotency', 'update');
