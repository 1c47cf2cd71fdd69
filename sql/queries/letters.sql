-- name: find_failures
-- Where the emails of dead letters stand; an id that is missing has no row.
select email_id, message_key, status, attempt_count, dead_letter_discarded_at is not null
from dispatcher.email_log
where email_id = any(%(email_ids)s)
    and email_id between %(lowest_id)s and %(highest_id)s;
