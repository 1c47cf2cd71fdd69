-- name: find_filled_defaults
-- Default partitions that hold rows, which no partition took; none where partitions were always made ahead.
select 'email_log_default'
where exists (select 1 from email_log_default)
union all
select 'email_content_default'
where exists (select 1 from email_content_default)
union all
select 'email_attachment_default'
where exists (select 1 from email_attachment_default)
union all
select 'email_attempt_default'
where exists (select 1 from email_attempt_default);
