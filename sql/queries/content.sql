-- The content of one email, read when it is about to be sent: content that is large, has attachments, or could not be read
-- together with others.

-- name: find_content
-- No row: the content was deleted.
select created_at, sender, recipients, subject, text_body, html_body, template_id, template_data, headers, tags
from dispatcher.email_content
join dispatcher.email_log using (email_id)
where email_id = %(email_id)s;

-- name: find_attachments
-- In their order, each with its size.
select position, filename, content_type, octet_length(content)
from dispatcher.email_attachment
where email_id = %(email_id)s
order by position;

-- name: find_attachment_slice
-- Some octets of an attachment, counted from 1. No row: it was deleted.
select substring(content from %(from)s for %(octets)s)
from dispatcher.email_attachment
where email_id = %(email_id)s
    and position = %(position)s;

-- name: find_content_octets
-- How many octets the content of an email has, for emails that have no stored size. Reads sizes, and no content.
select (
    select coalesce(octet_length(text_body), 0) + coalesce(octet_length(html_body), 0)
    from dispatcher.email_content
    where email_id = %(email_id)s
) + (
    select coalesce(sum(octet_length(content)), 0)
    from dispatcher.email_attachment
    where email_id = %(email_id)s
);
