-- The statements that define schedules and steer them by hand; those that fire them are in scheduler.sql.

-- name: read
-- Schedules by name; $1 null: all. The table is small.
select id, name, source, actor, kind, expression, timezone, dst_strategy, catch_up, catch_up_max,
    extract(epoch from catch_up_window)::float8 as catch_up_window, overlap, extract(epoch from smear)::float8 as smear,
    payload::text as payload, payload_factory, options::text as options, identity_key, enabled, disabled_by, retired_at,
    version, nullif(next_fire_at, '-infinity') as next_fire_at, last_fired_at, last_job_id, last_error, last_error_at,
    consecutive_failures, clock_timestamp() as now
from {schema}.schedules
where $1::text is null or name = $1::text
order by name

-- name: actors
-- The actors that workers have made known. The table is small.
select actor from {schema}.actor_config order by actor

-- name: create
-- Creates a schedule, unless one has its name, retired ones included. Answers whether it did. Locks nothing.
with made as (
    insert into {schema}.schedules (id, name, source, actor, kind, expression, timezone, dst_strategy, catch_up,
        catch_up_max, catch_up_window, overlap, smear, payload, payload_factory, options, identity_key, enabled, disabled_by)
    values ($1::uuid, $2::text, $3::text, $4::text, $5::text, $6::text, $7::text, $8::text, $9::text, $10::int,
        make_interval(secs => $11::float8), $12::text, make_interval(secs => $13::float8), $14::jsonb, $15::text,
        $16::jsonb, $17::text, $18::bool, case when not $18::bool then 'operator' end)
    on conflict (name) do nothing
    returning id, version
), noted as (
    insert into {schema}.schedule_decisions (id, schedule_id, version, action)
    select {schema}.uuid7(), id, version, 'created' from made
)
select exists (select from made)

-- name: change
-- Replaces the definition of a schedule that still has the version $2; the claim on it ends, and where $18 says so the
-- next slot is found anew. One that its failures had paused goes on. Answers whether it did. Primary key.
with changed as (
    update {schema}.schedules set
        source = $3::text, actor = $4::text, kind = $5::text, expression = $6::text, timezone = $7::text,
        dst_strategy = $8::text, catch_up = $9::text, catch_up_max = $10::int,
        catch_up_window = make_interval(secs => $11::float8), overlap = $12::text,
        smear = make_interval(secs => $13::float8), payload = $14::jsonb, payload_factory = $15::text,
        options = $16::jsonb, identity_key = $17::text,
        next_fire_at = case when $18::bool then '-infinity' else next_fire_at end,
        enabled = enabled or coalesce(disabled_by = 'auto', false), disabled_by = nullif(disabled_by, 'auto'),
        consecutive_failures = 0, retry_not_before = null, last_error = null, last_error_at = null,
        claim_token = null, claim_expires_at = null, version = version + 1, updated_at = clock_timestamp()
    where id = $1::uuid and version = $2::int and retired_at is null
    returning id, version
), noted as (
    insert into {schema}.schedule_decisions (id, schedule_id, version, action, reason)
    select {schema}.uuid7(), id, version, 'changed', left($19::text, 2000) from changed
)
select exists (select from changed)

-- name: steer
-- Pauses, resumes or retires ($3) a schedule that has the version $2, null: whichever. A resumed one begins anew: its
-- next slot is found from then on, its failures are forgotten. The claim on it ends. Answers whether it did. Serves from
-- the unique index of names.
with steered as (
    update {schema}.schedules set
        enabled = $3::text = 'resumed',
        disabled_by = case when $3::text <> 'resumed' then 'operator' end,
        retired_at = case when $3::text = 'retired' then clock_timestamp() end,
        next_fire_at = case when $3::text = 'resumed' then '-infinity' else next_fire_at end,
        consecutive_failures = case when $3::text = 'resumed' then 0 else consecutive_failures end,
        last_error = case when $3::text = 'resumed' then null else last_error end,
        last_error_at = case when $3::text = 'resumed' then null else last_error_at end,
        retry_not_before = null, claim_token = null, claim_expires_at = null,
        version = version + 1, updated_at = clock_timestamp()
    where name = $1::text and retired_at is null and ($2::int is null or version = $2::int)
      and (enabled <> ($3::text = 'resumed') or $3::text = 'retired')
    returning id, version
), noted as (
    insert into {schema}.schedule_decisions (id, schedule_id, version, action, reason)
    select {schema}.uuid7(), id, version, $3::text, left($4::text, 500) from steered
)
select exists (select from steered)

-- name: begin_run_now
-- Stamps a run by hand, unless the last one is less than $2 seconds ago. Answers the version, the moment, and the wait.
-- Serves from the unique index of names; locks the schedule.
with found as materialized (
    select id, version, clock_timestamp() as at,
        extract(epoch from ran_now_at + make_interval(secs => $2::float8) - clock_timestamp())::float8 as wait
    from {schema}.schedules where name = $1::text and retired_at is null for update
), stamped as (
    update {schema}.schedules s set ran_now_at = f.at from found f where s.id = f.id and coalesce(f.wait, 0) <= 0
)
select id, version, at, wait from found

-- name: decided
-- What was decided on a schedule last. Serves from schedule_decisions_schedule.
select action, decided_at, as_of, cursor_from, cursor_to, fired, suppressed, skipped, reason
from {schema}.schedule_decisions where schedule_id = $1::uuid order by decided_at desc limit $2::int

-- name: deferred
-- What a running attempt has to make its payload of; nothing where its payload is stored. Primary key of jobs.
select metadata -> 'taskq_schedule' as schedule from {schema}.jobs
where id = $1::uuid and epoch = $2::int and payload_state = 'deferred' and lock_expires_at is not null

-- name: store_payload
-- Stores the payload that an attempt made, for the attempts after it, and forgets the failures of its schedule. Primary
-- keys of jobs, then schedules.
with stored as (
    update {schema}.jobs set payload = $3::jsonb, payload_state = 'stored'
    where id = $1::uuid and epoch = $2::int and payload_state = 'deferred' and lock_expires_at is not null
    returning id
)
update {schema}.schedules s set consecutive_failures = 0
from stored where s.id = $4::uuid and s.consecutive_failures > 0

-- name: strike_schedule
-- Counts the failure of a payload factory, while the attempt that called it still is the job's. Answers whether that
-- paused the schedule. Primary key of jobs; locks the schedule.
select {schema}.schedule_failed($3::uuid, $4::text, $5::uuid, true, null) from {schema}.jobs
where id = $1::uuid and epoch = $2::int and payload_state = 'deferred' and lock_expires_at is not null
