-- The metadata of an email: keys and values of the application, which are text. With the content, because content is
-- written once and read where metadata is shown: an email_log row would copy them at each change of status.
alter table email_content add column metadata jsonb;
comment on column email_content.metadata is 'Texts by key; null: none. Deleted together with the content.';
-- Contains only emails with metadata, so other inserts do not write it. The list of pending entries is short: a search reads
-- all of it, and an insert that fills it waits until it is empty.
create index email_content_metadata on email_content using gin (metadata jsonb_path_ops)
    with (gin_pending_list_limit = 256) where metadata is not null;

-- The newest `most` emails, between two ids, whose metadata contains `wanted`. Reads in windows that double, as
-- find_recipients does: a rare value is found with the index, and a frequent one in the first windows.
create function find_metadata(wanted jsonb, below_id uuid, from_id uuid, most bigint) returns setof uuid
language plpgsql stable rows 50
set search_path from current
set enable_seqscan = off
set jit = off
as $$
declare
    oldest uuid;
    newest uuid;
    upper_id uuid := below_id;
    lower_id uuid;
    lower_at timestamptz;
    width interval := '1 hour';
    found bigint;
begin
    if wanted is null then
        return;
    end if;
    select email_id into oldest from email_content where email_id >= from_id order by email_id limit 1;
    select email_id into newest from email_content where email_id < below_id order by email_id desc limit 1;
    lower_at := to_timestamp(('x' || left(replace(newest::text, '-', ''), 12))::bit(48)::bigint / 1000.0);
    while upper_id > oldest loop
        lower_at := lower_at - width;
        lower_id := greatest(oldest, email_id_lowest_at(lower_at));
        return query execute
            'select email_id from email_content where email_id < $1 and email_id >= $2 and metadata @> $3 '
            'order by email_id desc limit $4'
        using upper_id, lower_id, wanted, most;
        get diagnostics found = row_count;
        most := most - found;
        exit when most <= 0;
        upper_id := lower_id;
        width := 2 * width;
    end loop;
end
$$;

-- An email and its corrected copies name each other (the action `resend`). No index, so that both are written in place.
alter table email_log add column resent_from uuid, add column resent_as uuid[];
comment on column email_log.resent_from is 'The email of which this one is a copy, perhaps with another recipient. Null: none.';
comment on column email_log.resent_as is 'The copies of this email, oldest first. Null: none.';
