-- The statements of a worker process. Sessions that run them are pinned (storage/connect.py), so that a plan never
-- flips to a scan or a sort of the backlog. `id = any(array[x])` is `id = x` without the walk over the whole primary
-- key that the planner prefers on a nearly empty table, in a plan that outlives that state. Lock order everywhere: jobs in
-- id order, skipping what others hold, then gates, then batches, each in id order.

-- name: register_worker
-- Announces this process. Serves presence and the release of its rows; primary key only.
insert into {schema}.workers
    (id, hostname, pid, queues, max_concurrency, worker_label, workgroup_instance, worker_group)
values ($1::uuid, $2::text, $3::int, $4::text[], $5::int, $6::text, $7::uuid, $8::text)

-- name: beat_worker
-- Presence. Answers whether somebody has declared this worker dead. Primary key; HOT.
update {schema}.workers set last_seen_at = clock_timestamp()
where id = $1::uuid
returning dead_at is not null as dead

-- name: stop_worker
-- From here on the rows of this worker are interrupts, not crashes. Primary key.
update {schema}.workers set stopping_at = coalesce(stopping_at, clock_timestamp()), last_seen_at = clock_timestamp()
where id = $1::uuid

-- name: unregister_worker
-- The worker has ended and holds nothing. A row that still names it keeps the worker's row, for the reaper. Primary key.
delete from {schema}.workers w
where w.id = $1::uuid
  and not exists (select from {schema}.jobs j where j.status = 'running' and j.worker_id = w.id)

-- name: sync_actor
-- Stores what the code declares of an actor; capacity and queue stay as the operator left them. Writes only on change.
-- Answers the stored queue. Primary key of actor_config.
with changed as (
    insert into {schema}.actor_config as c
        (actor, queue, max_attempts, retry_kind, retry_backoff, retry_base, retry_cap, retry_jitter, time_budget, priority,
         has_hooks, max_pending, max_concurrent, result_ttl, reservations)
    values ($1::text, $2::text, $3::int, $4::text, $5::text, $6::real, $7::real, $8::real, make_interval(secs => $9::float8),
        $10::smallint, $11::bool, $12::int, $13::int, make_interval(secs => $14::float8), $15::text[])
    on conflict (actor) do update set
        max_attempts = excluded.max_attempts, retry_kind = excluded.retry_kind,
        retry_backoff = excluded.retry_backoff, retry_base = excluded.retry_base, retry_cap = excluded.retry_cap,
        retry_jitter = excluded.retry_jitter, time_budget = excluded.time_budget, priority = excluded.priority,
        has_hooks = excluded.has_hooks, reservations = excluded.reservations, updated_at = clock_timestamp()
    where (c.max_attempts, c.retry_kind, c.retry_backoff, c.retry_base, c.retry_cap, c.retry_jitter, c.priority,
           c.has_hooks)
          is distinct from (excluded.max_attempts, excluded.retry_kind, excluded.retry_backoff, excluded.retry_base,
                            excluded.retry_cap, excluded.retry_jitter, excluded.priority, excluded.has_hooks)
       or c.time_budget is distinct from excluded.time_budget
       or c.reservations is distinct from excluded.reservations
    returning queue
)
select queue from changed
union all
select c.queue from {schema}.actor_config c where c.actor = $1::text and not exists (select from changed)

-- name: heads
-- Where pending rows begin: each (route, priority) of the plain lane, and each other lane, one for all fairness keys and one
-- for all identities of an actor ($2 are those it knows), with the actor of its first row. A loose scan of jobs_claim: one
-- probe each, at most 5,000 of either and a route.
with recursive plain(route, priority, actor) as (
    select q.route, x.priority, x.actor
    from unnest($1::text[]) q(route) cross join lateral (
        select j.priority, j.actor from {schema}.jobs j
        where j.status = 'pending' and j.route = q.route and j.lane = ''
        order by j.priority desc, j.scheduled_at, j.id limit 1
    ) x
    union all
    select p.route, x.priority, x.actor
    from plain p cross join lateral (
        select j.priority, j.actor from {schema}.jobs j
        where j.status = 'pending' and j.route = p.route and j.lane = '' and j.priority < p.priority
        order by j.priority desc, j.scheduled_at, j.id limit 1
    ) x
), other(route, lane, priority, actor, step) as (
    select q.route, x.lane, x.priority, x.actor, 1
    from unnest($1::text[]) q(route) cross join lateral (
        select j.lane, j.priority, j.actor from {schema}.jobs j
        where j.status = 'pending' and j.route = q.route and j.lane > ''
        order by j.lane, j.priority desc, j.scheduled_at, j.id limit 1
    ) x
    union all
    select o.route, x.lane, x.priority, x.actor, o.step + 1
    from other o cross join lateral (
        select j.lane, j.priority, j.actor from {schema}.jobs j
        where j.status = 'pending' and j.route = o.route
          and j.lane > (case left(o.lane, 2) when 'f:' then 'g' when 'i:' then 'i:' || o.actor || ' ' else o.lane end)
        order by j.lane, j.priority desc, j.scheduled_at, j.id limit 1
    ) x
    where o.step < 5000
)
(select route, '' as lane, priority, actor from plain limit 5000)
union all
(select route, lane, priority, actor from other
 where left(lane, 2) = 'f:' or actor = any($2::text[]) limit 1000)

-- name: queue_rules
-- What the operator has set of these queues. Primary key.
select name, mode = 'round_robin' as round_robin, max_concurrent is not null as capped, paused_at is not null as paused
from {schema}.queues where name = any($1::text[])

-- name: actor_rules
-- Which of these actors are limited, and by what. Primary key.
select actor, max_concurrent is not null as capped, coalesce(reservations, '{}') as reservations
from {schema}.actor_config where gated and actor = any($1::text[])

-- name: relane
-- Moves rows that stand in the plain lane and are not claimed from it to their own: of limited actors ($2), and of actors
-- that others know ($3 are ours), once a thousand of them stand in the way. Looks at the first 2,000 rows of the route.
-- Serves from jobs_claim; skips what others hold.
with head as materialized (
    select j.ctid, j.actor, j.identity_key, j.fairness_key from {schema}.jobs j
    where j.status = 'pending' and j.route = $1::text and j.lane = ''
    order by j.priority desc, j.scheduled_at, j.id
    limit 2000
), moving as materialized (
    select h.ctid from head h
    where h.actor = any($2::text[])
       or (h.actor <> all($3::text[]) and (select count(*) from head s where s.actor <> all($3::text[])) >= 1000)
), locked as materialized (
    select j.ctid from moving m join {schema}.jobs j on j.ctid = m.ctid
    where (j.status = 'pending') is true and (j.lane = '') is true
    for no key update of j skip locked
), moved as (
    update {schema}.jobs j set lane = {schema}.lane_of(j.actor, j.identity_key, j.fairness_key, true, false)
    from locked l where j.ctid = l.ctid
    returning 1
)
select count(*)::int from moved

-- name: relane_fair
-- Moves jobs of limited actors ($2) out of the lanes of fairness keys to their own: looks at the first ten rows of 200 such
-- lanes of the route, those after $3, and answers how many it moved and where it stopped, null at the end. Serves from
-- jobs_claim; skips what others hold.
with recursive walk(lane, step) as (
    (select j.lane, 1 from {schema}.jobs j
     where j.status = 'pending' and j.route = $1::text and j.lane < 'g' and j.lane > greatest('f:', $3::text collate "C")
     order by j.lane limit 1)
    union all
    (select x.lane, w.step + 1
     from walk w cross join lateral (
        select j.lane from {schema}.jobs j
        where j.status = 'pending' and j.route = $1::text and j.lane < 'g' and j.lane > w.lane
        order by j.lane limit 1
     ) x
     where w.step < 200)
), moving as materialized (
    select x.ctid from walk w cross join lateral (
        select j.ctid, j.actor from {schema}.jobs j
        where j.status = 'pending' and j.route = $1::text and j.lane = w.lane
        order by j.priority desc, j.scheduled_at, j.id
        limit 10
    ) x
    where x.actor = any($2::text[])
), locked as materialized (
    select j.ctid from moving m join {schema}.jobs j on j.ctid = m.ctid
    where (j.status = 'pending') is true and (left(j.lane, 2) = 'f:') is true
    for no key update of j skip locked
), moved as (
    update {schema}.jobs j set lane = {schema}.lane_of(j.actor, j.identity_key, j.fairness_key, true, false)
    from locked l where j.ctid = l.ctid
    returning 1
)
select (select count(*)::int from moved) as moved,
    (select case when count(*) = 200 then max(w.lane) end from walk w) as stopped

-- name: set_reservation
-- Stores how many jobs a reservation lets through at once.
select {schema}.set_gate('r:' || $1::text, $2::int)

-- name: claim_lanes
-- Claims from lanes with limits, turns or identities: see the function.
select unit, note, lane, id, epoch, actor, payload, attempt, route, priority, scheduled_at, batch_id, start_to_close,
    progress_state, progress_seq
from {schema}.claim_lanes($1::int, $2::uuid, $3::float8, $4::text[], $5::jsonb)

-- name: claim
-- Takes up to $1 due rows of the known actors ($7) over ordered segments of the plain lane, each from its floor on.
-- Serves from jobs_claim; the nested loop stops at $1 and locks exactly what it returns. Every claim raises the epoch
-- and spends an attempt.
with taken as materialized (
    select x.ctid
    from unnest($3::text[], $4::smallint[], $5::timestamptz[], $6::uuid[]) seg(route, priority, floor_at, floor_id)
    cross join lateral (
        select j.ctid from {schema}.jobs j
        where j.status = 'pending' and j.route = seg.route and j.lane = '' and j.priority = seg.priority
          and (j.scheduled_at, j.id) >= (seg.floor_at, seg.floor_id)
          and j.scheduled_at <= statement_timestamp()
          and j.actor = any($7::text[])
          and (j.schedule_to_close is null or j.schedule_to_close > clock_timestamp())
        order by j.scheduled_at, j.id
        limit $1::int
        for update skip locked
    ) x
    limit $1::int
)
update {schema}.jobs j set
    status = 'running', epoch = j.epoch + 1, attempt = j.attempt + 1, worker_id = $2::uuid,
    claimed_at = clock_timestamp(), started_at = null, last_heartbeat_at = null,
    lock_expires_at = clock_timestamp() + make_interval(secs => $8::float8)
from taken t
where j.ctid = t.ctid
returning j.id, j.epoch, j.actor, j.payload::text as payload, j.attempt, j.route, j.priority,
    j.scheduled_at, j.batch_id, extract(epoch from j.start_to_close)::float8 as start_to_close,
    j.progress_state::text as progress_state, j.progress_seq

-- name: renew
-- Extends the leases of (id, epoch) pairs that are near their end, and stamps the start of what began meanwhile. Rows
-- that somebody holds locked are left for the next beat. Answers the pairs that are no longer this attempt's.
-- Primary key of jobs; touches no indexed column, so it stays HOT.
with given as materialized (
    select * from unnest($1::uuid[], $2::int[], $3::float8[]) as g(id, epoch, run_seconds)
), near as materialized (
    select j.id, g.run_seconds
    from given g join {schema}.jobs j on j.id = any(array[g.id])
    where j.epoch = g.epoch and j.lock_expires_at is not null
      and (j.lock_expires_at < clock_timestamp() + make_interval(secs => $5::float8)
           or j.heartbeat_timeout is not null
           or (j.started_at is null and g.run_seconds is not null))
    for no key update of j skip locked
), renewed as (
    update {schema}.jobs j set
        lock_expires_at = clock_timestamp() + make_interval(secs => $4::float8),
        last_heartbeat_at = clock_timestamp(),
        started_at = coalesce(j.started_at, clock_timestamp() - make_interval(secs => n.run_seconds))
    from near n where j.id = any(array[n.id])
    returning j.id
)
select g.id, g.epoch
from given g left join {schema}.jobs j on j.id = any(array[g.id])
where j.epoch <> g.epoch or j.lock_expires_at is null  -- a row that is gone has no lease

-- name: cancelled
-- The running attempts of this worker whose jobs were cancelled. Serves from jobs_cancel.
select id, epoch from {schema}.jobs
where worker_id = $1::uuid and cancel_requested_at is not null and status = 'running'

-- name: force_cancel
-- Records, before its task is cancelled, that an attempt ignored the request. Primary key.
update {schema}.jobs set cancel_phase = 2
where id = $1::uuid and epoch = $2::int and lock_expires_at is not null and cancel_requested_at is not null

-- name: store_progress
-- Stores what attempts report of their progress. Rows that somebody holds locked are left for the next time. Primary
-- key of jobs; touches no indexed column, so it stays HOT.
with given as materialized (
    select * from unnest($1::uuid[], $2::int[], $3::int[], $4::text[]) as g(id, epoch, seq, state)
), locked as materialized (
    select g.* from given g join {schema}.jobs j on j.id = any(array[g.id])
    where j.epoch = g.epoch and j.lock_expires_at is not null
    for no key update of j skip locked
)
update {schema}.jobs j set progress_state = l.state::jsonb, progress_seq = l.seq
from locked l where j.id = any(array[l.id])

-- name: settle_succeeded
-- Ends attempts well. Answers the ids it applied to; the caller asks `settle_state` about the rest. Primary key of
-- jobs: no index predicate is repeated, so no statistics can turn this into a walk over the running index. The lateral
-- lock and the join by ctid leave the planner one way. A row that somebody renewed since this statement began is
-- missed, and still this attempt's. What it gave back is claimed again in the same transaction, where $5 to $9 are the
-- arguments of `claim_lanes`, which runs after it and waits for no gate. Giving back waits for one, a second at most.
with given as materialized (
    select * from unnest($1::uuid[], $2::int[], $3::float8[], $4::text[]) as g(id, epoch, run_seconds, result)
), locked as materialized (
    select x.*, g.run_seconds, g.result
    from given g cross join lateral (
        select j.ctid, j.held_gates from {schema}.jobs j
        where j.id = g.id and j.epoch = g.epoch and j.lock_expires_at is not null
        for no key update skip locked
    ) x
), settled as (
    update {schema}.jobs j set
        status = 'succeeded', finished_at = clock_timestamp(), lock_expires_at = null, held_gates = null, cancel_phase = 0,
        started_at = coalesce(j.started_at, clock_timestamp() - make_interval(secs => l.run_seconds)),
        result = l.result::jsonb, result_size_bytes = octet_length(l.result),
        result_expires_at = case when l.result is not null then clock_timestamp()
            + (select c.result_ttl from {schema}.actor_config c where c.actor = j.actor) end,
        error_class = null, error_message = null, error_traceback = null,
        idempotency_freed = j.unique_while_active
    from locked l where j.ctid = l.ctid
    returning j.id, j.batch_id, l.held_gates
), ended as materialized (
    select array_agg(id) as ids,
        (select {schema}.free_gates((select array_agg(gate) from settled cross join lateral unnest(held_gates) gate))
         where exists (select from settled where held_gates is not null)),
        (select {schema}.count_batches(array_agg(s.batch_id), array_agg('running'::{schema}.job_status), array_agg('succeeded'::{schema}.job_status))
         from settled s where s.batch_id is not null)
    from settled
)
select e.ids, c.*
from ended e left join lateral (
    select unit, note, lane, id, epoch, actor, payload, attempt, route, priority, scheduled_at, batch_id, start_to_close,
        progress_state, progress_seq
    -- what the function does it has done when its rows are filtered: without units it does nothing
    from {schema}.claim_lanes($5::int, $6::uuid, $7::float8, $8::text[], case when e.ids is not null then $9::jsonb end)
    where $9::jsonb is not null
) c on true

-- name: settle_failed
-- Ends attempts badly: each waits for its next attempt where it may have one, else its job fails, or is cancelled where
-- that was asked. $7 null is the row's own kind, $8 null waits on its own retry curve; $9 names the error class of a job
-- that has no attempt left, null keeps the error's own.
-- Primary key of jobs, then job_attempts and actor_config by theirs.
with given as materialized (
    select * from unnest($1::uuid[], $2::int[], $3::float8[], $4::text[], $5::text[], $6::text[], $7::text[], $8::float8[],
                         $9::text[])
        as g(id, epoch, run_seconds, error_class, error_message, error_traceback, retry_kind, delay, exhausted_class)
), locked as materialized (
    select g.*, j.attempt, j.worker_id, j.claimed_at, j.actor, j.held_gates, j.schedule_to_close,
        j.cancel_requested_at is not null as cancelling,
        coalesce(j.started_at, clock_timestamp() - make_interval(secs => g.run_seconds)) as started_at,
        coalesce(g.retry_kind, j.retry_kind) <> 'non_retryable'
            and (coalesce(g.retry_kind, j.retry_kind) = 'indefinite' or j.attempt < j.max_attempts) as may_retry,
        coalesce(make_interval(secs => g.delay),
            {schema}.retry_delay(j.attempt, j.retry_backoff, j.retry_base, j.retry_cap, j.retry_jitter)) as wait
    from given g join {schema}.jobs j on j.id = any(array[g.id])
    where j.epoch = g.epoch and j.lock_expires_at is not null
    for no key update of j skip locked
), decided as materialized (
    select l.*,
        l.may_retry and not l.cancelling
            and (l.schedule_to_close is null or clock_timestamp() + l.wait < l.schedule_to_close) as again
    from locked l
), attempted as (
    insert into {schema}.job_attempts (job_id, epoch, attempt, worker_id, claimed_at, started_at, outcome, error_class,
        error_message, error_traceback)
    select d.id, d.epoch, d.attempt, d.worker_id, d.claimed_at, d.started_at, 'retried', d.error_class, d.error_message,
        d.error_traceback
    from decided d where d.again
    on conflict (job_id, epoch) do nothing
), settled as (
    update {schema}.jobs j set
        status = (case when d.cancelling then 'cancelled' when not d.again then 'failed'
                       when d.wait > interval '0' then 'scheduled' else 'pending' end)::{schema}.job_status,
        epoch = j.epoch + d.again::int,
        scheduled_at = case when d.again then clock_timestamp() + d.wait else j.scheduled_at end,
        finished_at = case when d.again then null else clock_timestamp() end,
        started_at = case when d.again then null else d.started_at end,
        claimed_at = case when d.again then null else j.claimed_at end,
        worker_id = case when d.again then null else j.worker_id end,
        lock_expires_at = null, held_gates = null, cancel_phase = 0,
        error_class = case when d.again then d.error_class
                           when d.cancelling and j.cancel_phase = 2 then 'CancelledForced'
                           when d.cancelling then 'CancelledCooperatively'
                           when d.may_retry then 'DeadlineExceeded'
                           else coalesce(d.exhausted_class, d.error_class) end,
        error_message = case when not d.again and d.may_retry and not d.cancelling then 'schedule_to_close reached before next dispatch'
                             else d.error_message end,
        error_traceback = d.error_traceback,
        idempotency_freed = j.unique_while_active and not d.again,
        route = case when d.again then coalesce(c.queue, j.queue) else j.route end,
        lane = case when d.again then {schema}.lane_now(j.actor, coalesce(c.queue, j.queue), j.identity_key, j.fairness_key)
                    else j.lane end
    from decided d left join {schema}.actor_config c on c.actor = d.actor
    where j.id = any(array[d.id])
    returning j.id, j.status, j.batch_id, d.held_gates
)
select array_agg(id) as ids, array_agg(status::text) as statuses, count(*) filter (where status = 'pending') as repended,
    count(*) filter (where status = 'failed') as failed,
    (select {schema}.free_gates((select array_agg(gate) from settled cross join lateral unnest(held_gates) gate))
     where exists (select from settled where held_gates is not null)),
    (select {schema}.count_batches(array_agg(s.batch_id), array_agg('running'::{schema}.job_status), array_agg(s.status))
     from settled s where s.batch_id is not null and s.status not in ('pending', 'scheduled'))
from settled

-- name: settle_snoozed
-- Puts jobs off and gives their attempt back. One that would land past its schedule_to_close fails instead, and one
-- that was cancelled ends. Primary key of jobs, then job_attempts and actor_config by theirs.
with given as materialized (
    select * from unnest($1::uuid[], $2::int[], $3::float8[], $4::float8[]) as g(id, epoch, run_seconds, delay)
), locked as materialized (
    select g.*, j.attempt, j.worker_id, j.claimed_at, j.actor, j.held_gates,
        coalesce(j.started_at, clock_timestamp() - make_interval(secs => g.run_seconds)) as started_at,
        j.cancel_requested_at is not null as cancelling,
        j.cancel_requested_at is null and (j.schedule_to_close is null
            or clock_timestamp() + make_interval(secs => g.delay) < j.schedule_to_close) as again
    from given g join {schema}.jobs j on j.id = any(array[g.id])
    where j.epoch = g.epoch and j.lock_expires_at is not null
    for no key update of j skip locked
), attempted as (
    insert into {schema}.job_attempts (job_id, epoch, attempt, worker_id, claimed_at, started_at, outcome)
    select l.id, l.epoch, l.attempt, l.worker_id, l.claimed_at, l.started_at, 'snoozed'
    from locked l where l.again
    on conflict (job_id, epoch) do nothing
), settled as (
    update {schema}.jobs j set
        status = (case when l.cancelling then 'cancelled' when not l.again then 'failed'
                       when l.delay > 0 then 'scheduled' else 'pending' end)::{schema}.job_status,
        epoch = j.epoch + l.again::int,
        attempt = j.attempt - l.again::int,
        snooze_count = j.snooze_count + 1,
        scheduled_at = case when l.again then clock_timestamp() + make_interval(secs => l.delay) else j.scheduled_at end,
        finished_at = case when l.again then null else clock_timestamp() end,
        started_at = case when l.again then null else l.started_at end,
        claimed_at = case when l.again then null else j.claimed_at end,
        worker_id = case when l.again then null else j.worker_id end,
        lock_expires_at = null, held_gates = null, cancel_phase = 0,
        error_class = case when l.again then j.error_class
                           when l.cancelling and j.cancel_phase = 2 then 'CancelledForced'
                           when l.cancelling then 'CancelledCooperatively'
                           else 'DeadlineExceeded' end,
        error_message = case when l.again then j.error_message
                             when not l.cancelling then 'schedule_to_close reached before next dispatch' end,
        idempotency_freed = j.unique_while_active and not l.again,
        route = case when l.again then coalesce(c.queue, j.queue) else j.route end,
        lane = case when l.again then {schema}.lane_now(j.actor, coalesce(c.queue, j.queue), j.identity_key, j.fairness_key)
                    else j.lane end
    from locked l left join {schema}.actor_config c on c.actor = l.actor
    where j.id = any(array[l.id])
    returning j.id, j.status, j.batch_id, l.held_gates
)
select array_agg(id) as ids, array_agg(status::text) as statuses, count(*) filter (where status = 'pending') as repended,
    count(*) filter (where status = 'failed') as failed,
    (select {schema}.free_gates((select array_agg(gate) from settled cross join lateral unnest(held_gates) gate))
     where exists (select from settled where held_gates is not null)),
    (select {schema}.count_batches(array_agg(s.batch_id), array_agg('running'::{schema}.job_status), array_agg(s.status))
     from settled s where s.batch_id is not null and s.status not in ('pending', 'scheduled'))
from settled

-- name: settle_released
-- Hands rows back to the fleet: an attempt that had begun is an interrupt (spent, counted, never the end of a job); one
-- that had not is refunded and leaves no trace. A job that was cancelled ends instead. Wakes other workers. Primary key
-- of jobs, then job_attempts and actor_config by theirs.
with given as materialized (
    select * from unnest($1::uuid[], $2::int[], $3::float8[], $4::text[]) as g(id, epoch, run_seconds, cause)
), locked as materialized (
    select g.*, j.attempt, j.worker_id, j.claimed_at, j.actor, j.held_gates, g.run_seconds is not null as began,
        j.cancel_requested_at is null as again,
        coalesce(j.started_at, clock_timestamp() - make_interval(secs => g.run_seconds)) as started_at
    from given g join {schema}.jobs j on j.id = any(array[g.id])
    where j.epoch = g.epoch and j.lock_expires_at is not null
    for no key update of j skip locked
), attempted as (
    insert into {schema}.job_attempts (job_id, epoch, attempt, worker_id, claimed_at, started_at, outcome, cause)
    select l.id, l.epoch, l.attempt, l.worker_id, l.claimed_at, l.started_at, 'interrupted', l.cause
    from locked l where l.began and l.again
    on conflict (job_id, epoch) do nothing
), settled as (
    update {schema}.jobs j set
        status = (case when l.again then 'pending' else 'cancelled' end)::{schema}.job_status,
        epoch = j.epoch + l.again::int,
        attempt = j.attempt - (not l.began)::int,
        interrupt_count = j.interrupt_count + (l.began and l.again)::int,
        finished_at = case when l.again then null else clock_timestamp() end,
        started_at = case when l.again then null else l.started_at end,
        claimed_at = case when l.again then null else j.claimed_at end,
        worker_id = case when l.again then null else j.worker_id end,
        lock_expires_at = null, held_gates = null, last_heartbeat_at = null, cancel_phase = 0,
        error_class = case when l.again then j.error_class
                           when not l.began then 'CancelledBeforeStart'
                           when j.cancel_phase = 2 then 'CancelledForced'
                           else 'CancelledCooperatively' end,
        error_message = case when l.again then j.error_message end,
        error_traceback = case when l.again then j.error_traceback end,
        idempotency_freed = j.unique_while_active and not l.again,
        route = case when l.again then coalesce(c.queue, j.queue) else j.route end,
        lane = case when l.again then {schema}.lane_now(j.actor, coalesce(c.queue, j.queue), j.identity_key, j.fairness_key)
                    else j.lane end
    from locked l left join {schema}.actor_config c on c.actor = l.actor
    where j.id = any(array[l.id])
    returning j.id, j.status, j.batch_id, l.held_gates
)
select array_agg(id) as ids, array_agg(status::text) as statuses, count(*) filter (where status = 'pending') as repended, 0::bigint as failed,
    (select {schema}.wake() where exists (select from settled where status = 'pending')),
    (select {schema}.free_gates((select array_agg(gate) from settled cross join lateral unnest(held_gates) gate))
     where exists (select from settled where held_gates is not null)),
    (select {schema}.count_batches(array_agg(s.batch_id), array_agg('running'::{schema}.job_status), array_agg(s.status))
     from settled s where s.batch_id is not null and s.status not in ('pending', 'scheduled'))
from settled

-- name: settle_abandoned
-- Ends attempts of cancelled jobs whose handlers outlasted every grace. Primary key of jobs.
with given as materialized (
    select * from unnest($1::uuid[], $2::int[], $3::float8[]) as g(id, epoch, run_seconds)
), locked as materialized (
    select g.*, j.held_gates from given g join {schema}.jobs j on j.id = any(array[g.id])
    where j.epoch = g.epoch and j.lock_expires_at is not null
    for no key update of j skip locked
), noted as (
    insert into {schema}.job_events (job_id, kind, detail)
    select l.id, 'state_change', jsonb_build_object('from_state', 'running', 'to_state', 'abandoned',
        'reason', 'cancel', 'epoch', l.epoch)
    from locked l
), settled as (
    update {schema}.jobs j set
        status = 'abandoned', finished_at = clock_timestamp(), lock_expires_at = null, held_gates = null, cancel_phase = 0,
        started_at = coalesce(j.started_at, clock_timestamp() - make_interval(secs => l.run_seconds)),
        error_class = 'CancelAbandoned', error_message = 'the actor did not end after it was cancelled',
        error_traceback = null,
        idempotency_freed = j.unique_while_active
    from locked l where j.id = any(array[l.id])
    returning j.id, j.status, j.batch_id, l.held_gates
)
select array_agg(id) as ids, array_agg(status::text) as statuses, 0::bigint as repended, 0::bigint as failed,
    (select {schema}.free_gates((select array_agg(gate) from settled cross join lateral unnest(held_gates) gate))
     where exists (select from settled where held_gates is not null)),
    (select {schema}.count_batches(array_agg(s.batch_id), array_agg('running'::{schema}.job_status), array_agg(s.status))
     from settled s where s.batch_id is not null and s.status not in ('pending', 'scheduled'))
from settled

-- name: settle_state
-- Where attempts stand that a settlement did not apply to: still this attempt's (somebody holds the row locked), ended
-- by it already, or lost. Primary keys of jobs and job_attempts.
select g.id, g.epoch, j.status::text as status, coalesce(j.epoch = g.epoch, false) as same_epoch,
    coalesce(j.epoch = g.epoch and j.lock_expires_at is not null, false) as held, a.outcome
from unnest($1::uuid[], $2::int[]) as g(id, epoch)
left join {schema}.jobs j on j.id = any(array[g.id])
left join {schema}.job_attempts a on a.job_id = any(array[g.id]) and a.epoch = g.epoch

-- name: take_unseen_ends
-- Takes ends that nobody has told these actors of, for $3 seconds. Primary key of unseen_ends, which is small.
with due as materialized (
    select u.ctid from {schema}.unseen_ends u
    where u.actor = any($1::text[]) and (u.taken_until is null or u.taken_until < clock_timestamp())
    order by u.job_id, u.epoch
    limit $2::int
    for update skip locked
)
update {schema}.unseen_ends u set taken_until = clock_timestamp() + make_interval(secs => $3::float8)
from due d where u.ctid = d.ctid
returning u.job_id, u.epoch, u.actor, u.status::text

-- name: defer_ends
-- Leaves ends to be told to their actors by another worker. A job that was pruned meanwhile is left out.
insert into {schema}.unseen_ends (job_id, epoch, actor, status)
select g.job_id, g.epoch, g.actor, g.status::{schema}.job_status
from unnest($1::uuid[], $2::int[], $3::text[], $4::text[]) as g(job_id, epoch, actor, status)
join {schema}.jobs j on j.id = g.job_id
on conflict (job_id, epoch) do nothing

-- name: forget_unseen_end
-- The hook was called. Primary key.
delete from {schema}.unseen_ends where job_id = $1::uuid and epoch = $2::int

-- name: any_active
-- Whether a job of these queues and actors still has work ahead. The cheap question first: jobs_claim, then the small
-- running index, then the scheduled ones.
select exists (select from {schema}.jobs
               where status = 'pending' and route = any($1::text[]) and actor = any($2::text[]))
    or exists (select from {schema}.jobs
               where status = 'running' and route = any($1::text[]) and actor = any($2::text[]))
    or exists (select from {schema}.jobs
               where status = 'scheduled' and route = any($1::text[]) and actor = any($2::text[]))

-- name: ended_badly
-- How many jobs of these queues and actors have ended other than well since this worker registered. Serves from
-- jobs_finished.
select count(*) from {schema}.jobs
where status in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned')
  and finished_at >= (select w.started_at from {schema}.workers w where w.id = $3::uuid)
  and status <> 'succeeded' and route = any($1::text[]) and actor = any($2::text[])

-- name: micro_maintenance
-- What an idle claim does before it sleeps: takes back a few expired rows, makes due ones claimable and recounts batches
-- that somebody held when a job of theirs ended, so that a fleet without a scheduler still moves. Serves from the small
-- running index and jobs_due; skips what others hold.
with due as materialized (
    select ctid from {schema}.jobs
    where status = 'scheduled' and scheduled_at <= statement_timestamp()
    order by scheduled_at
    limit 100
    for update skip locked
), promoted as (
    update {schema}.jobs j set status = 'pending' from due d where j.ctid = d.ctid returning 1
)
select {schema}.reap(5) as reaped, (select count(*)::int from promoted) as promoted, {schema}.expire_deadlines(5) as expired,
    (select {schema}.repair_batches(5) where exists (select from {schema}.batch_recounts)) as recounted
