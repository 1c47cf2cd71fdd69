-- Functions that work whatever a session's search_path, and for roles that do not own the tables.

-- Those that read tables by a name in their text look it up in this schema and nowhere else.
alter function email_partition_make(text, text, uuid, uuid) set search_path from current;
alter function email_partition_tune(text) set search_path from current;
alter function email_partitions_make(timestamptz, integer) set search_path from current;
alter function email_partition_prune(text, timestamptz) set search_path from current;
alter function email_partition_prune(text, timestamptz, timestamptz) set search_path from current;
alter function email_log_enqueued_since(uuid, uuid, timestamptz) set search_path from current;
alter function email_log_must_stay(uuid, uuid, timestamptz) set search_path from current;
alter function operator_audit_keep() set search_path from current;

-- As in 0011, but a function that has a parameter of ours as its own setting can be made by a superuser alone. So it sets the
-- parameter itself, for as long as it takes.
create or replace function operator_audit_prune(before_at timestamptz, at_most integer) returns setof bigint
language plpgsql
set search_path from current
as $$
begin
    perform set_config('dispatcher.prune_audit', 'on', true);
    return query
    delete from operator_audit
    where audit_id in (
        select audit_id
        from operator_audit
        where acted_at < before_at
        order by acted_at
        limit at_most
    )
    returning audit_id;
    perform set_config('dispatcher.prune_audit', 'off', true);
end
$$;

-- As in 0008, but of our own tables alone: who may call email_partition_prune must not drop another application's.
create or replace function email_partitions_ended(parent text, before_at timestamptz)
returns table (partition text, from_id uuid, until_id uuid)
language sql stable
set search_path from current
as $$
    select
        name,
        email_id_lowest_at(week at time zone 'UTC'),
        email_id_lowest_at((week + interval '1 week') at time zone 'UTC')
    from (
        select c.relname::text as name, to_date(substring(c.relname from '_p(\d{8})$'), 'YYYYMMDD')::timestamp as week
        from pg_inherits as i
        join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = to_regclass(quote_ident(parent))
            and parent in ('email_log', 'email_content', 'email_attachment', 'email_attempt')
    ) as weekly
    where (week + interval '1 week') at time zone 'UTC' <= before_at
    order by name
$$;

-- Partitions are made and dropped, and acts are forgotten, with the rights of the tables' owner. `dispatcher topology grants`
-- says who may call them.
alter function email_partitions_make(timestamptz, integer) security definer;
alter function email_partition_prune(text, timestamptz) security definer;
alter function email_partition_prune(text, timestamptz, timestamptz) security definer;
alter function operator_audit_prune(timestamptz, integer) security definer;
revoke execute on function email_partitions_make(timestamptz, integer) from public;
revoke execute on function email_partition_prune(text, timestamptz) from public;
revoke execute on function email_partition_prune(text, timestamptz, timestamptz) from public;
revoke execute on function operator_audit_prune(timestamptz, integer) from public;

-- What an operator's filter selects, as dead_emails (0006) says it for the release before. One plain select, so that the
-- planner sees through it to the index of unfinished emails; a setting of its own would hide it from the planner. Its names
-- were looked up when it was made (`begin atomic`).
create function find_dead_emails(
    selected_status text,
    selected_error_type text,
    selected_provider text,
    selected_tenant_id text,
    selected_text text,
    older_than_seconds double precision,
    newer_than_seconds double precision,
    selected_ids uuid[],
    selected_discarded boolean
) returns table (
    email_id uuid,
    tenant_id text,
    message_key text,
    correlation_id text,
    status text,
    error_type text,
    last_error text,
    attempt_count integer,
    provider text,
    created_at timestamptz,
    was_uncertain boolean,
    dead_letter_due_at timestamptz,
    dead_letter_discarded_at timestamptz
)
language sql stable
begin atomic
    select
        e.email_id, e.tenant_id, e.message_key, e.correlation_id, e.status, e.error_type, e.last_error, e.attempt_count,
        e.provider, e.created_at, e.was_uncertain, e.dead_letter_due_at, e.dead_letter_discarded_at
    from email_log as e
    where e.status in ('failed', 'held')
        and (selected_status is null or e.status = selected_status)
        and (selected_error_type is null or e.error_type = selected_error_type)
        and (selected_provider is null or e.provider = selected_provider)
        and (selected_tenant_id is null or e.tenant_id = selected_tenant_id)
        and (selected_text is null or position(lower(selected_text) in lower(e.last_error)) > 0)
        and (older_than_seconds is null or e.created_at < now() - older_than_seconds * interval '1 second')
        and (newer_than_seconds is null or e.created_at > now() - newer_than_seconds * interval '1 second')
        and (selected_ids is null or e.email_id = any(selected_ids))
        and (selected_discarded is null or (e.dead_letter_discarded_at is not null) = selected_discarded);
end;

comment on function find_dead_emails is 'Failed and held emails by a filter; an age counts from when the email was enqueued.';
