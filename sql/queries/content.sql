-- Statements that read the content of one email just before the email is sent. Used if the content is large, has
-- attachments, or could not be read in a batch.

-- name: find_content
-- The content of an email without its attachments; first the time in the Date header (see lease.sql). No row: the
-- content was deleted.
select
    case
        when leased_at > coalesce(due_since, created_at) + interval '2 hours' then leased_at
        else coalesce(due_since, created_at)
    end,
    sender, recipients, subject, text_body, html_body, template_id, template_data, headers, tags, channel
from dispatcher.email_content
join dispatcher.email_log using (email_id)
where email_id = %(email_id)s;

-- name: find_attachments
-- The attachments in order, each with its size. `enqueue_attachments` inserts an email's attachments with the positions
-- 0 to attachment_count - 1. A row with another position was added to the email later, so it is not part of the email.
-- `part`: what a row has that is no attachment (see migration 0007).
select position, filename, content_type, octet_length(content), content_id, part
from dispatcher.email_attachment
where email_id = %(email_id)s
    and position between 0 and (
        select attachment_count - 1 from dispatcher.email_content where email_id = %(email_id)s
    )
order by position;

-- name: find_attachment_slice
-- Octets of an attachment from a position that counts from 1. No row: the attachment was deleted.
select substring(content from %(from)s for %(octets)s)
from dispatcher.email_attachment
where email_id = %(email_id)s
    and position = %(position)s;

-- name: find_content_octets
-- The size of an email's content in octets, if no size was stored. Reads only sizes, no content.
select (
    select coalesce(octet_length(text_body), 0) + coalesce(octet_length(html_body), 0)
    from dispatcher.email_content
    where email_id = %(email_id)s
) + (
    select coalesce(sum(octet_length(content)), 0)
    from dispatcher.email_attachment
    where email_id = %(email_id)s
        and position between 0 and (
            select attachment_count - 1 from dispatcher.email_content where email_id = %(email_id)s
        )
);
