-- name: lock_resendable
-- What a copy of an email takes from its rows besides the content, and what speaks against a copy. Locks the email, so that
-- no replay and no other copy is made at the same time. No row: the tenant (null: any) has no such email.
select
    e.tenant_id, e.message_key, e.status, e.was_uncertain, e.recipient_outcomes is not null as was_partly_delivered,
    e.lane, e.topic, e.on_uncertain::text, e.correlation_id, e.expires_at, c.email_id is not null as has_content, c.metadata,
    coalesce(c.tags ? 'one_time_code', false) as is_erased, coalesce(c.ignore_suppression, false) as ignore_suppression
from dispatcher.email_log as e
left join dispatcher.email_content as c using (email_id)
where email_id = %(email_id)s
    and (%(tenant_id)s::text is null or e.tenant_id = %(tenant_id)s)
for no key update of e;

-- name: link_resent
-- Links an email and its copy, which was inserted in the same transaction, and audits this. One row.
with copied as (
    update dispatcher.email_log
    set resent_from = %(email_id)s
    where email_id = %(copy_id)s
),
changed as (
    update dispatcher.email_log
    set resent_as = array_append(resent_as, %(copy_id)s::uuid)
    where email_id = %(email_id)s
    returning
        email_id, 'resend' as act,
        jsonb_build_object('resent_as', %(copy_id)s::uuid, 'changed', %(changed)s::text[]) as detail
),
{audited_emails}
select email_id
from changed;
