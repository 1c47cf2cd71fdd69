-- As in 0033, with a channel. The function with ten parameters stays for the release before.
create function find_dead_emails(
    selected_status text,
    selected_error_type text,
    selected_provider text,
    selected_tenant_id text,
    selected_text text,
    older_than_seconds double precision,
    newer_than_seconds double precision,
    selected_ids uuid[],
    selected_discarded boolean,
    selected_tag text,
    selected_channel text
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
        and (selected_discarded is null or (e.dead_letter_discarded_at is not null) = selected_discarded)
        and (selected_channel is null or coalesce(e.channel, 'email') = selected_channel)
        and (
            selected_tag is null
            or (select c.tags ? selected_tag from email_content as c where c.email_id = e.email_id)
        );
end;

comment on function find_dead_emails(
    text, text, text, text, text, double precision, double precision, uuid[], boolean, text, text
) is 'Failed and held emails by a filter; an age counts from when the email was enqueued. A tag is found while the content is kept.';
