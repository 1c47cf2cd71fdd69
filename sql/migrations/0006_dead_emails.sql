-- What an operator's filter selects: the one place that says what each word of it means. One plain select, so that the
-- planner sees through it to the index of unfinished emails; a parameter that is null does not filter.
create function dead_emails(
    selected_status text,
    selected_error_type text,
    selected_provider text,
    selected_tenant_id text,
    selected_text text,
    older_than_seconds double precision,
    newer_than_seconds double precision,
    selected_ids uuid[],
    selected_discarded boolean
) returns setof email_log
language sql stable
as $$
    select e.*
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
        and (selected_discarded is null or (e.dead_letter_discarded_at is not null) = selected_discarded)
$$;

comment on function dead_emails is 'Failed and held emails by a filter; an age counts from when the email was enqueued.';
