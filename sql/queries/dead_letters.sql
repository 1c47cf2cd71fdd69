-- name: find_dead_letter_emails
-- The emails that these dead letters are about. If an id is missing in the result, the email does not exist.
select email_id, message_key, status, attempt_count, dead_letter_discarded_at is not null
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s;
