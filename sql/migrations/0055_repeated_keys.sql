-- An application that repeats a message key gets the id of its email, and learns whether the payload is the same. Its role
-- needs no right to read payload_hash any more. The hash has no secret key, so a role that reads it can hash a million
-- texts, and find the one in "482913 is your code.".

comment on column email_idempotency.payload_hash is
    'SHA-256 of the payload, to recognise a repeated enqueue. Empty: the email was erased (`dispatcher forget`).';

-- The emails that have these message keys: a row per key that exists, and payload_hash of the argument if the stored hash
-- is the same; otherwise null. If a key is asked with several hashes, its row with a hash is the last of its rows.
--
-- A key without an email is deleted, so that the caller can enqueue its email. `enqueue` inserts both in one statement; a
-- role that may enqueue can also insert a key alone. After a day, the email may have been pruned (the shortest retention),
-- so the key stays.
--
-- A role that may not read the stored hash could guess here, too. So each wrong guess about a key takes a tenth of a
-- second, and a call with a million guesses does not end. A role that cancels the call after a wrong guess needs a
-- statement per guess. A wrong guess is a mistake of an application: it has used one key for two payloads.
create function find_keys(tenant_ids text[], message_keys text[], payload_hashes bytea[])
returns table (tenant_id text, message_key text, email_id uuid, payload_hash bytea)
language plpgsql security definer
set search_path from current
as $$
#variable_conflict use_column
begin
    delete from email_idempotency as k
    using unnest(tenant_ids, message_keys) as asked (tenant_id, message_key)
    where k.tenant_id = asked.tenant_id
        and k.message_key = asked.message_key
        and k.completed_at is null
        and k.created_at > clock_timestamp() - interval '1 day'
        and not exists (
            select from email_log as e
            where e.email_id = k.email_id
                and e.tenant_id = k.tenant_id
                and e.message_key = k.message_key
        );
    return query
    select k.tenant_id, k.message_key, k.email_id, case when k.payload_hash = asked.payload_hash then asked.payload_hash end
    from unnest(tenant_ids, message_keys, payload_hashes) as asked (tenant_id, message_key, payload_hash)
    join email_idempotency as k using (tenant_id, message_key)
    order by k.payload_hash = asked.payload_hash;
    if not has_column_privilege(session_user, 'email_idempotency', 'payload_hash', 'select') then
        perform pg_sleep(0.1 * max(wrong))
        from (
            select count(*) as wrong
            from unnest(tenant_ids, message_keys, payload_hashes) as asked (tenant_id, message_key, payload_hash)
            join email_idempotency as k using (tenant_id, message_key)
            where k.payload_hash <> asked.payload_hash
            group by k.tenant_id, k.message_key
        ) as guessed;
    end if;
end
$$;

revoke execute on function find_keys(text[], text[], bytea[]) from public;

-- Applications enqueue after the upgrade, before the owner has repeated `dispatcher topology grants`.
do $$
declare
    grantee text;
begin
    for grantee in
        select acl.grantee::regrole::text
        from pg_class as c, aclexplode(c.relacl) as acl
        where c.oid = 'email_idempotency'::regclass
            and acl.privilege_type = 'INSERT'
            and acl.grantee not in (0, c.relowner)
    loop
        execute format('grant execute on function find_keys(text[], text[], bytea[]) to %s', grantee);
    end loop;
end
$$;
