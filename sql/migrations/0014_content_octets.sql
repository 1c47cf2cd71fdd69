-- How much an email's content holds. A worker reads large content when it is about to send it, not when it leases the email.

alter table email_content add column octets integer;

comment on column email_content.octets is
    'Bodies, template data and attachments together. Null: written by a release that did not store it.';
