-- The scope `content`: a key with it reads the sender, the recipients and the subject of emails.
alter table api_key drop constraint api_key_scopes_known;
alter table api_key add constraint api_key_scopes_known check (
    scopes <@ array['send', 'read', 'operate', 'ignore_suppression', 'content']
) not valid;
