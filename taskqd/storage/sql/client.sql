-- The statements of a client: enqueue and reads.

-- name: enqueue
-- Inserts jobs; one whose idempotency key is taken inserts nothing. Answers the ids inserted. Serves from
-- jobs_idempotency. Locks nothing that exists; waits only for an uncommitted insert of the same key, and inserts in key
-- order, so that batches that share keys cannot deadlock. One stamp for all: the ids keep the caller's order.
insert into {schema}.jobs (
    id, actor, queue, route, payload, priority, scheduled_at, status, idempotency_scope, idempotency_key,
    unique_while_active, tags, metadata, start_to_close, schedule_to_close, max_attempts, retry_kind, retry_backoff,
    retry_base, retry_cap, retry_jitter, batch_id
)
select g.id, g.actor, g.queue, g.queue, g.payload::jsonb, g.priority, coalesce(g.scheduled_at, (select clock_timestamp())),
    (case when g.scheduled_at > clock_timestamp() then 'scheduled' else 'pending' end)::{schema}.job_status,
    g.idempotency_scope, g.idempotency_key, g.unique_while_active, string_to_array(g.tags, ','), g.metadata::jsonb,
    make_interval(secs => g.start_to_close), clock_timestamp() + make_interval(secs => g.time_budget), g.max_attempts,
    g.retry_kind, g.retry_backoff, g.retry_base, g.retry_cap, g.retry_jitter, g.batch_id
from unnest(
    $1::uuid[], $2::text[], $3::text[], $4::text[], $5::smallint[], $6::timestamptz[], $7::text[], $8::text[],
    $9::bool[], $10::text[], $11::text[], $12::float8[], $13::float8[], $14::int[], $15::text[], $16::text[],
    $17::real[], $18::real[], $19::real[], $20::uuid[]
) with ordinality as g(
    id, actor, queue, payload, priority, scheduled_at, idempotency_scope, idempotency_key, unique_while_active, tags,
    metadata, start_to_close, time_budget, max_attempts, retry_kind, retry_backoff, retry_base, retry_cap, retry_jitter,
    batch_id, ord
)
order by g.idempotency_scope collate "C", g.idempotency_key collate "C", g.ord
on conflict (idempotency_scope, idempotency_key) where idempotency_key is not null and not idempotency_freed do nothing
returning id

-- name: key_holders
-- The jobs that hold idempotency keys. Serves from jobs_idempotency.
select g.ord, j.id, j.actor
from unnest($1::text[], $2::text[]) with ordinality as g(scope, key, ord)
join {schema}.jobs j on j.idempotency_scope = g.scope and j.idempotency_key = g.key
where j.idempotency_key is not null and not j.idempotency_freed

-- name: wake
-- Wakes sleeping workers of the schema when the surrounding transaction commits.
select {schema}.wake()

-- name: job
-- One job. Primary key.
select id, actor, queue, route, status::text as status, priority, attempt, max_attempts, epoch, interrupt_count,
    snooze_count, created_at, scheduled_at, claimed_at, started_at, finished_at, schedule_to_close, worker_id, batch_id,
    idempotency_scope, idempotency_key, payload::text as payload, result::text as result,
    metadata::text as metadata, tags, error_class, error_message, error_traceback
from {schema}.jobs where id = $1::uuid

-- name: batch_jobs
-- A page of a batch's jobs in the order they were made. Serves from jobs_batch.
select id, actor, queue, route, status::text as status, priority, attempt, max_attempts, epoch, interrupt_count,
    snooze_count, created_at, scheduled_at, claimed_at, started_at, finished_at, schedule_to_close, worker_id, batch_id,
    idempotency_scope, idempotency_key, payload::text as payload, result::text as result,
    metadata::text as metadata, tags, error_class, error_message, error_traceback
from {schema}.jobs where batch_id = $1::uuid and id > $2::uuid order by id limit $3::int

-- name: job_status
-- The status of one job. Primary key.
select status::text from {schema}.jobs where id = $1::uuid

-- name: batch_counts
-- How many jobs of a batch are in each status. Serves from jobs_batch.
select status::text as status, count(*) as jobs from {schema}.jobs where batch_id = $1::uuid group by status

-- name: open_batch
-- Records a batch once. Primary key; locks no existing row.
insert into {schema}.batches (id) values ($1::uuid) on conflict (id) do nothing
