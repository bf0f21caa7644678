-- The statements of a client: enqueue and reads.

-- name: enqueue
-- Inserts jobs and answers the ids inserted. Inserts nothing for one whose idempotency key is taken, for another
-- singleton, and, unless $26 says that the jobs were counted, for one of an actor that has a max_pending. Serves from
-- jobs_idempotency and jobs_singleton; actor_config and queues are small and read once: joined, they cost a quarter of a
-- plain enqueue. Locks nothing that exists; waits only for an uncommitted insert of the same key, and inserts in key
-- order, so that batches that share keys cannot deadlock. One stamp for all: the ids keep the caller's order. With $27
-- the commit wakes sleeping workers, if anything was inserted.
insert into {schema}.jobs (
    id, actor, queue, route, lane, payload, priority, scheduled_at, status, idempotency_scope, idempotency_key,
    unique_while_active, tags, metadata, start_to_close, schedule_to_close, heartbeat_timeout, max_attempts, retry_kind,
    retry_backoff, retry_base, retry_cap, retry_jitter, batch_id, identity_key, fairness_key, serial, singleton, capped
)
select g.id, g.actor, g.queue, g.queue,
    {schema}.lane_of(g.actor, g.identity_key, g.fairness_key,
        g.actor = any(array(select c.actor from {schema}.actor_config c where c.gated)),
        g.queue = any(array(select q.name from {schema}.queues q where q.mode = 'round_robin'))),
    g.payload::jsonb, g.priority, coalesce(g.scheduled_at, (select clock_timestamp())),
    (case when g.scheduled_at > clock_timestamp() then 'scheduled' else 'pending' end)::{schema}.job_status,
    g.idempotency_scope, g.idempotency_key, g.unique_while_active, string_to_array(g.tags, ','), g.metadata::jsonb,
    make_interval(secs => g.start_to_close), clock_timestamp() + make_interval(secs => g.schedule_to_close),
    make_interval(secs => g.heartbeat_timeout), g.max_attempts, g.retry_kind, g.retry_backoff, g.retry_base, g.retry_cap,
    g.retry_jitter, g.batch_id, g.identity_key, g.fairness_key, g.identity_key is not null, g.singleton, g.capped
from unnest(
    $1::uuid[], $2::text[], $3::text[], $4::text[], $5::smallint[], $6::timestamptz[], $7::text[], $8::text[],
    $9::bool[], $10::text[], $11::text[], $12::float8[], $13::float8[], $14::float8[], $15::int[], $16::text[],
    $17::text[], $18::real[], $19::real[], $20::real[], $21::uuid[], $22::text[], $23::text[], $24::bool[], $25::bool[]
) with ordinality as g(
    id, actor, queue, payload, priority, scheduled_at, idempotency_scope, idempotency_key, unique_while_active, tags,
    metadata, start_to_close, schedule_to_close, heartbeat_timeout, max_attempts, retry_kind, retry_backoff, retry_base,
    retry_cap, retry_jitter, batch_id, identity_key, fairness_key, singleton, capped, ord
)
where $26::bool or g.actor <> all(array(select c.actor from {schema}.actor_config c where c.max_pending is not null))
order by g.idempotency_scope collate "C", g.idempotency_key collate "C", g.ord
on conflict do nothing
returning id, (select {schema}.wake() where $27::bool)

-- name: lane_rules
-- Which of these actors are limited, and which of these queues take turns. Primary keys.
select
    array(select c.actor from {schema}.actor_config c where c.gated and c.actor = any($1::text[])) as gated,
    array(select q.name from {schema}.queues q where q.mode = 'round_robin' and q.name = any($2::text[])) as round_robin

-- name: key_holders
-- The jobs that hold idempotency keys. Serves from jobs_idempotency.
select g.ord, j.id, j.actor
from unnest($1::text[], $2::text[]) with ordinality as g(scope, key, ord)
join {schema}.jobs j on j.idempotency_scope = g.scope and j.idempotency_key = g.key
where j.idempotency_key is not null and not j.idempotency_freed

-- name: singletons
-- The jobs of these actors that let no other in, and the seconds until they are due. Serves from jobs_singleton.
select j.actor, j.id, extract(epoch from j.scheduled_at - clock_timestamp())::float8 as due_in
from {schema}.jobs j
where j.singleton and j.status in ('scheduled', 'pending', 'running') and j.actor = any($1::text[])

-- name: singletons_beside
-- The job that keeps one singleton from coming back. Primary key, then jobs_singleton.
select j.actor, j.id, extract(epoch from j.scheduled_at - clock_timestamp())::float8 as due_in
from {schema}.jobs one join {schema}.jobs j on j.actor = one.actor
where one.id = $1::uuid and one.singleton and j.singleton and j.status in ('scheduled', 'pending', 'running')

-- name: count_capped
-- Counts the queued jobs of the actors that have a max_pending, and lets nobody else count them meanwhile.
select name, queued, cap from {schema}.count_capped($1::text[], $2::int[], $3::int)

-- name: unique_holders
-- The jobs that are enough for their actor and identity, and lets nobody else look for them meanwhile.
select ord, id from {schema}.unique_holders($1::text[], $2::text[], $3::float8[], $4::text[], $5::int)

-- name: clock
-- The database's time.
select clock_timestamp()

-- name: wake
-- Wakes sleeping workers of the schema when the surrounding transaction commits.
select {schema}.wake()

-- name: job
-- One job. Primary key.
select id, actor, queue, route, status::text as status, priority, attempt, max_attempts, epoch, interrupt_count,
    snooze_count, created_at, scheduled_at, claimed_at, started_at, finished_at, schedule_to_close, worker_id, batch_id,
    idempotency_scope, idempotency_key, identity_key, fairness_key, payload::text as payload, result::text as result,
    metadata::text as metadata, tags, error_class, error_message, error_traceback,
    progress_seq, progress_state::text as progress_state
from {schema}.jobs where id = $1::uuid

-- name: archived_job
-- One job of the archive. Primary key.
select id, actor, queue, route, status::text as status, priority, attempt, max_attempts, epoch, interrupt_count,
    snooze_count, created_at, scheduled_at, claimed_at, started_at, finished_at, schedule_to_close, worker_id, batch_id,
    idempotency_scope, idempotency_key, identity_key, fairness_key, payload::text as payload, result::text as result,
    metadata::text as metadata, tags, error_class, error_message, error_traceback,
    progress_seq, progress_state::text as progress_state, archived_at
from {schema}.jobs_archive where id = $1::uuid

-- name: batch_jobs
-- A page of a batch's jobs in the order they were made. Serves from jobs_batch.
select id, actor, queue, route, status::text as status, priority, attempt, max_attempts, epoch, interrupt_count,
    snooze_count, created_at, scheduled_at, claimed_at, started_at, finished_at, schedule_to_close, worker_id, batch_id,
    idempotency_scope, idempotency_key, identity_key, fairness_key, payload::text as payload, result::text as result,
    metadata::text as metadata, tags, error_class, error_message, error_traceback,
    progress_seq, progress_state::text as progress_state
from {schema}.jobs where batch_id = $1::uuid and id > $2::uuid order by id limit $3::int

-- name: list_jobs
-- A page of the jobs that fit. What serves it is told at the function.
select id, actor, queue, route, status::text as status, priority, attempt, max_attempts, epoch, interrupt_count,
    snooze_count, created_at, scheduled_at, claimed_at, started_at, finished_at, schedule_to_close, worker_id, batch_id,
    idempotency_scope, idempotency_key, identity_key, fairness_key, payload::text as payload, result::text as result,
    metadata::text as metadata, tags, error_class, error_message, error_traceback,
    progress_seq, progress_state::text as progress_state
from {schema}.list_jobs($1::text, $2::text[]::{schema}.job_status[], $3::text, $4::text, $5::uuid, $6::text[], $7::text,
    $8::int, $9::int, $10::timestamptz, $11::uuid)

-- name: cancel
-- Cancels one job: at once while it waits, by asking its attempt while it runs; one that has ended stays as it is. Tells
-- the workers at commit. Primary key of jobs, then its batch.
with locked as materialized (
    select id, status from {schema}.jobs where id = $1::uuid for no key update
), ended as (
    update {schema}.jobs j set
        status = 'cancelled', epoch = j.epoch + 1, finished_at = clock_timestamp(),
        cancel_requested_at = clock_timestamp(), cancel_phase = 0,
        error_class = 'CancelledBeforeStart', error_message = $2::text, error_traceback = null,
        idempotency_freed = j.unique_while_active
    from locked l where j.id = l.id and l.status in ('scheduled', 'pending')
    returning j.status, l.status as old, j.batch_id
), requested as (
    update {schema}.jobs j set cancel_requested_at = clock_timestamp(), cancel_phase = 1
    from locked l where j.id = l.id and l.status = 'running' and j.cancel_requested_at is null
    returning j.status
), done as (
    select status from ended union all select status from requested
), noted as (
    insert into {schema}.job_events (job_id, kind, detail)
    select l.id, 'cancel', jsonb_build_object('from_state', l.status, 'to_state', d.status, 'reason', $2::text)
    from locked l, done d
)
select l.status::text as before, coalesce(d.status, l.status)::text as after, d.status is not null as initiated,
    (select {schema}.notify_cancel() where d.status = 'running'),
    (select {schema}.count_batches(array_agg(e.batch_id), array_agg(e.old), array_agg(e.status))
     from ended e where e.batch_id is not null)
from locked l left join done d on true

-- name: cancel_where
-- Cancels a window of the jobs that fit and have not ended, as `cancel` does one, the newest first; $7 is the reason, $8
-- how many, behind the id $9. Answers each job of the window; what ended before it was locked is left alone. What serves
-- it is told at list_jobs(); then the primary key of jobs, locked in id order, then their batches.
with picked as materialized (
    select id from {schema}.list_jobs($1::text, $2::text[]::{schema}.job_status[], $3::text, $4::text, $5::uuid, $6::text[],
        'created', $8::int, null, null, $9::uuid)
), locked as materialized (
    select j.id, j.status from {schema}.jobs j where j.id = any(array(select id from picked))
    order by j.id
    for no key update
), ended as (
    update {schema}.jobs j set
        status = 'cancelled', epoch = j.epoch + 1, finished_at = clock_timestamp(),
        cancel_requested_at = clock_timestamp(), cancel_phase = 0,
        error_class = 'CancelledBeforeStart', error_message = $7::text, error_traceback = null,
        idempotency_freed = j.unique_while_active
    from locked l where j.id = l.id and l.status in ('scheduled', 'pending')
    returning j.id, j.status, l.status as old, j.batch_id
), requested as (
    update {schema}.jobs j set cancel_requested_at = clock_timestamp(), cancel_phase = 1
    from locked l where j.id = l.id and l.status = 'running' and j.cancel_requested_at is null
    returning j.id, j.status, l.status as old
), done as (
    select id, status, old from ended union all select id, status, old from requested
), noted as (
    insert into {schema}.job_events (job_id, kind, detail)
    select d.id, 'cancel', jsonb_build_object('from_state', d.old, 'to_state', d.status, 'reason', $7::text)
    from done d
)
select array(select id from ended order by id) as cancelled, array(select id from requested order by id) as requested,
    (select count(*) from picked) as picked, (select id from picked order by id limit 1) as last,
    (select {schema}.notify_cancel() where exists (select from requested)),
    (select {schema}.count_batches(array_agg(e.batch_id), array_agg(e.old), array_agg(e.status))
     from ended e where e.batch_id is not null)

-- name: retry
-- Puts an ended job back into its queue, with one attempt more where it had none left; its end is kept in job_attempts.
-- Answers the status it had; a job that has not ended is left alone. Primary key of jobs, then job_attempts and
-- actor_config by theirs, then its batch.
with locked as materialized (
    select * from {schema}.jobs where id = $1::uuid for update
), ended as materialized (
    select * from locked where status in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned')
), attempted as (
    insert into {schema}.job_attempts (job_id, epoch, attempt, worker_id, claimed_at, started_at, finished_at, outcome,
        error_class, error_message, error_traceback)
    select e.id, e.epoch, e.attempt, e.worker_id, e.claimed_at, e.started_at, e.finished_at, e.status::text,
        e.error_class, e.error_message, e.error_traceback
    from ended e
    on conflict (job_id, epoch) do nothing
), noted as (
    insert into {schema}.job_events (job_id, kind, detail)
    select e.id, 'retry', jsonb_build_object('from_state', e.status, 'to_state', 'pending') from ended e
), pended as (
    update {schema}.jobs j set
        status = 'pending', epoch = j.epoch + 1, scheduled_at = clock_timestamp(),
        max_attempts = greatest(j.max_attempts, j.attempt + 1),
        finished_at = null, started_at = null, claimed_at = null, worker_id = null, last_heartbeat_at = null,
        cancel_requested_at = null, cancel_phase = 0,
        schedule_to_close = case when j.schedule_to_close > clock_timestamp() then j.schedule_to_close end,
        result = null, result_size_bytes = null, result_expires_at = null,
        error_class = null, error_message = null, error_traceback = null,
        idempotency_freed = false,
        route = coalesce(c.queue, j.queue),
        lane = {schema}.lane_now(j.actor, coalesce(c.queue, j.queue), j.identity_key, j.fairness_key)
    from ended e left join {schema}.actor_config c on c.actor = e.actor
    where j.id = e.id
    returning j.id, j.batch_id, e.status as old, j.status
)
select l.status::text as before, exists (select from pended) as retried,
    (select {schema}.wake() where exists (select from pended)),
    (select {schema}.count_batches(array_agg(p.batch_id), array_agg(p.old), array_agg(p.status))
     from pended p where p.batch_id is not null)
from locked l

-- name: job_status
-- The status of one job. Primary key.
select status::text from {schema}.jobs where id = $1::uuid

-- name: job_progress
-- How far one job has come. Primary key.
select status::text as status, progress_seq, progress_state::text as progress_state
from {schema}.jobs where id = $1::uuid

-- name: batch_counts
-- How many jobs of a batch are in each status, $2 left out. Serves from jobs_batch.
select status::text as status, count(*) as jobs from {schema}.jobs
where batch_id = $1::uuid and ($2::uuid is null or id <> $2::uuid) group by status

-- name: batch_state
-- The stored status of a batch. Primary key.
select status from {schema}.batches where id = $1::uuid

-- name: open_batch
-- Records a batch once and answers its status and its finalizer. Primary key; locks no existing row.
with opened as (
    insert into {schema}.batches (id, queue, total, failure_threshold) values ($1::uuid, $2::text, $3::int, $4::int)
    on conflict (id) do nothing
    returning status, finalizer_job_id
)
select status, finalizer_job_id from opened
union all
select b.status, b.finalizer_job_id from {schema}.batches b where b.id = $1::uuid and not exists (select from opened)

-- name: attach_finalizer
-- Gives a batch its finalizer, once; answers the one it has. Primary key of batches.
with attached as (
    update {schema}.batches set finalizer_job_id = $2::uuid where id = $1::uuid and finalizer_job_id is null
    returning finalizer_job_id
)
select finalizer_job_id from attached
union all
select b.finalizer_job_id from {schema}.batches b where b.id = $1::uuid and not exists (select from attached)

-- name: close_batch
-- Completes a batch none of whose jobs is in flight: its last end may have come before its finalizer.
select {schema}.close_batches(array[$1::uuid])

-- name: batches
-- The newest batches, $1 one of them, $2 of a queue, $3 (un)finished. Serves from batches_created.
select id, status, queue, total, succeeded, failed, cancelled, crashed, abandoned, consecutive_failures,
    failure_threshold, finalizer_job_id, created_at, completed_at
from {schema}.batches
where ($1::uuid is null or id = $1::uuid) and ($2::text is null or queue = $2::text)
  and ($3::bool is null or (completed_at is null) = $3::bool)
order by created_at desc, id desc
limit $4::int
