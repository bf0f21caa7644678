-- The statements of the scheduler.

-- name: register_scheduler
-- Announces this process. Primary key.
insert into {schema}.scheduler_heartbeat (scheduler_id, hostname, pid, worker_group)
values ($1::uuid, $2::text, $3::int, $4::text)

-- name: beat_scheduler
-- Proves that maintenance advances: stamps each duty that has run since the last beat. Primary key; HOT.
update {schema}.scheduler_heartbeat set
    beat_at = clock_timestamp(),
    tick_at = case when $2::bool then clock_timestamp() else tick_at end,
    promoted_at = case when $3::bool then clock_timestamp() else promoted_at end
where scheduler_id = $1::uuid

-- name: stop_scheduler
-- The scheduler ends on purpose: its row goes, so that a fallback need not wait for it to grow old. Primary key.
delete from {schema}.scheduler_heartbeat where scheduler_id = $1::uuid

-- name: forget_schedulers
-- Rows of schedulers that died a day ago or longer. A handful of rows.
delete from {schema}.scheduler_heartbeat where beat_at < clock_timestamp() - interval '1 day'

-- name: tick
-- One bounded round of housekeeping; answers JSON. See the function in the first migration for its locks.
select {schema}.tick($1::int)::text

-- name: promote
-- Makes due scheduled jobs claimable, oldest first from the floor $2, and answers the newest time it reached. Serves
-- from jobs_due; skips what others hold.
with due as materialized (
    select ctid from {schema}.jobs
    where status = 'scheduled' and scheduled_at >= $2::timestamptz and scheduled_at <= statement_timestamp()
    order by scheduled_at
    limit $1::int
    for update skip locked
), promoted as (
    update {schema}.jobs j set status = 'pending' from due d where j.ctid = d.ctid returning j.scheduled_at
)
select count(*)::int as promoted, max(scheduled_at) as reached from promoted

-- name: wake
-- Tells sleeping workers that promoted jobs wait.
select {schema}.wake()
