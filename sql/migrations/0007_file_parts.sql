-- Inline images, calendar objects and whole MIME messages are stored like attachments: a worker reads them just before it
-- sends the email, within its memory, and no statement of the other emails changes. No check constraint, which would read
-- the whole table.
alter table email_attachment add column content_id text, add column part text;
comment on column email_attachment.content_id is 'The id by which the HTML shows an inline image. Null: a file to download.';
comment on column email_attachment.part is
    'calendar: the alternative to the bodies, whose content_type has the method. raw: the whole MIME message. Null: a file.';
