-- Retention of what operators did: replays leave with their emails' time, acts when a setting says so.

create index email_replay_created on email_replay (created_at);
create index operator_audit_acted on operator_audit (acted_at);

-- Deletes some acts of before an instant, the oldest first; returns their ids. The one way to take any out of the record.
create function operator_audit_prune(before_at timestamptz, at_most integer) returns setof bigint
language sql
set dispatcher.prune_audit = 'on'
as $$
    delete from operator_audit
    where audit_id in (
        select audit_id
        from operator_audit
        where acted_at < before_at
        order by acted_at
        limit at_most
    )
    returning audit_id
$$;
