-- The statements of maintenance: the tick, promotion, and the firing of schedules.

-- name: tick
-- One bounded round of housekeeping; answers JSON. See the function in the first migration for its locks.
select {schema}.tick($1::int)::text

-- name: promote
-- Makes due scheduled jobs claimable, oldest first from the floor $2, and answers the newest time it reached, and until
-- when it looked. Serves from jobs_due; skips what others hold.
with due as materialized (
    select ctid from {schema}.jobs
    where status = 'scheduled' and scheduled_at >= $2::timestamptz and scheduled_at <= statement_timestamp()
    order by scheduled_at
    limit $1::int
    for update skip locked
), promoted as (
    update {schema}.jobs j set status = 'pending' from due d where j.ctid = d.ctid returning j.scheduled_at
)
select count(*)::int as promoted, max(scheduled_at) as reached, statement_timestamp() as until from promoted

-- name: next_scheduled
-- Seconds until the next scheduled job is due, of those that were not at $1. Serves from jobs_due.
select extract(epoch from scheduled_at - clock_timestamp())::float8 from {schema}.jobs
where status = 'scheduled' and scheduled_at > $1::timestamptz
order by scheduled_at limit 1

-- name: wake
-- Tells sleeping workers that promoted jobs wait.
select {schema}.wake()

-- name: claim_schedules
-- Takes up to $1 due schedules for a scheduler ($2) under a token ($3) that expires after $4 seconds; whoever holds none,
-- or a token that has expired, may not fire. Oldest first; skips what others hold locked. Serves from schedules_due.
with due as materialized (
    select id from {schema}.schedules
    where enabled and retired_at is null and next_fire_at <= statement_timestamp()
      and (retry_not_before is null or retry_not_before <= statement_timestamp())
      and (claim_expires_at is null or claim_expires_at <= statement_timestamp())
    order by next_fire_at
    limit $1::int
    for no key update skip locked
)
update {schema}.schedules s set
    claim_token = $3::uuid, claim_as_of = statement_timestamp(), claimed_by = $2::uuid,
    claim_expires_at = clock_timestamp() + make_interval(secs => $4::float8)
from due d where s.id = d.id
returning s.id, s.name, s.version, s.kind, s.expression, s.timezone, s.dst_strategy, s.catch_up, s.catch_up_max,
    s.catch_up_window, s.smear, nullif(s.next_fire_at, '-infinity') as next_fire_at, s.claim_as_of, s.consecutive_failures,
    s.identity_key is not null and s.options ? 'unique_for' or exists (
        select from {schema}.actor_config c where c.actor = s.actor and c.max_pending is not null) as guarded

-- name: release_schedules
-- Gives back what was claimed and not fired. Primary key.
update {schema}.schedules set claim_token = null, claim_expires_at = null
where id = any($1::uuid[]) and claim_token = $2::uuid

-- name: next_due
-- Seconds until the next schedule is due that could be claimed then: negative for one that is due since the last claim.
-- Serves from schedules_due.
select extract(epoch from next_fire_at - clock_timestamp())::float8 from {schema}.schedules
where enabled and retired_at is null
  and (next_fire_at > statement_timestamp()
       or (claim_expires_at is null or claim_expires_at <= statement_timestamp())
          and (retry_not_before is null or retry_not_before <= statement_timestamp()))
order by next_fire_at limit 1

-- name: schedule_health
-- How schedules fare: those that failures have paused, and how long the oldest due one has waited. The table is small.
select count(*) filter (where not enabled and disabled_by = 'auto')::int as auto_paused,
    coalesce(extract(epoch from clock_timestamp() - min(next_fire_at)
        filter (where enabled and next_fire_at between '0001-01-01 00:00:00+00' and clock_timestamp())), 0)::float8
        as oldest_due
from {schema}.schedules where retired_at is null

-- name: fail_schedules
-- Records schedules ($1) that could not fire and puts their next tries off; $4 says which count against them. Only
-- under the token. Answers those that are paused now. Primary key; locks them in id order.
select held.id, {schema}.schedule_failed(held.id, held.problem, $5::uuid, held.strike, make_interval(secs => held.wait)) as paused
from (
    select s.id, g.problem, g.strike, g.wait
    from unnest($1::uuid[], $2::text[], $3::float8[], $4::bool[]) as g(id, problem, wait, strike)
    join {schema}.schedules s on s.id = g.id
    where s.claim_token = $6::uuid
    order by s.id
    for update of s
) held

-- name: guard
-- Takes, for the transaction, the locks under which enqueue counts the queued jobs of an actor with max_pending and looks
-- for a job of the same identity, of the schedules $1 that need them; in the order of their keys, as enqueue does. In a
-- statement of its own before the fire, which then sees what those before it inserted. Primary keys.
select count(pg_advisory_xact_lock(k.key)) from (
    select distinct hashtextextended(
        'taskq:max_pending:' || {schema_literal} || ':' || s.actor, 0) as key
    from {schema}.schedules s join {schema}.actor_config c on c.actor = s.actor
    where s.id = any($1::uuid[]) and c.max_pending is not null
    union
    select hashtextextended(
        format('taskq:unique_for:%s:%s:%s:%s', {schema_literal}, length(s.actor), s.actor, s.identity_key), 0)
    from {schema}.schedules s
    where s.id = any($1::uuid[]) and s.identity_key is not null and s.options ? 'unique_for'
    order by key
) k

-- name: fire
-- One transaction of decisions: what was decided on each schedule, a row for each slot, a job where nothing keeps it
-- out, the next slot. Under the token $7 and before it expires, for the version that was claimed; or, without a token,
-- for a person, who moves no cursor. Answers the schedules it applied to: the others have changed hands. A slot that is
-- decided already is passed over, and a second row for it cannot be. Locks schedules in id order, skipping what others
-- hold; jobs that keep others out are singletons, of the same identity within the window, with overlap = forbid the last
-- one while it has not ended, and as many as their actor may have queued.
with given as materialized (
    select * from unnest($1::uuid[], $2::uuid[], $3::text[], $4::int[], $5::timestamptz[], $6::int[])
        as g(schedule_id, decision_id, action, version, cursor_to, skipped)
        order by schedule_id
), locked as materialized (
    select s.*, coalesce($8::timestamptz, s.claim_as_of) as as_of, g.decision_id, g.action, g.cursor_to, g.skipped
    from given g cross join lateral (
        select s.id, s.name, s.version, s.actor, s.overlap, s.payload, s.payload_factory, s.options, s.identity_key,
            s.next_fire_at, s.last_job_id, s.claim_as_of
        from {schema}.schedules s
        where s.id = g.schedule_id and s.version = g.version and s.retired_at is null
          and ($7::uuid is null or (s.claim_token = $7::uuid and s.claim_expires_at > clock_timestamp() and s.enabled))
        for update skip locked
    ) s
), slot as materialized (
    select l.*, t.due_at, t.job_id, row_number() over (partition by l.id order by t.due_at) as nth
    from unnest($9::uuid[], $10::timestamptz[], $11::uuid[]) as t(decision_id, due_at, job_id)
    join locked l on l.decision_id = t.decision_id
    -- A look-up for each, whatever the statistics say.
    where (select o.due_at from {schema}.schedule_occurrences o where o.schedule_id = l.id and o.due_at = t.due_at) is null
), crowd as materialized (
    select c.actor, c.max_pending, (
        select count(*) from (
            select from {schema}.jobs j
            where j.actor = c.actor and j.capped and j.status in ('scheduled', 'pending')
            limit c.max_pending
        ) x
    ) as queued
    from {schema}.actor_config c
    where c.max_pending is not null and c.actor in (select s.actor from slot s)
), weighed as materialized (
    select s.*, c.actor is not null as capped,
        coalesce(c.queued + row_number() over (partition by s.actor order by s.due_at) > c.max_pending, false) as crowded,
        s.overlap = 'forbid' and (s.nth > 1 or exists (
            select from {schema}.jobs j
            where j.id = s.last_job_id and j.status in ('scheduled', 'pending', 'running'))) as overlapping,
        s.identity_key is not null and s.options ? 'unique_for' and (s.nth > 1 or exists (
            select from {schema}.jobs j
            where j.actor = s.actor and j.identity_key = s.identity_key
              and j.created_at > clock_timestamp() - make_interval(secs => (s.options ->> 'unique_for')::float8)
              and j.status::text = any(coalesce(
                    (select array_agg(x) from jsonb_array_elements_text(s.options -> 'unique_states') x),
                    '{scheduled,pending,running}'))
        )) as doubled
    from slot s left join crowd c on c.actor = s.actor
), made as (
    insert into {schema}.jobs (id, scheduled_at, status, actor, queue, route, lane, priority, payload, payload_state, metadata,
        tags, start_to_close, schedule_to_close, max_attempts, retry_kind, retry_backoff, retry_base, retry_cap,
        retry_jitter, singleton, identity_key, serial, capped)
    select w.job_id, w.due_at, 'pending'::{schema}.job_status, w.actor, q.queue, q.queue,
        {schema}.lane_of(w.actor, w.identity_key, null, coalesce(c.gated, false), false),
        coalesce((w.options ->> 'priority')::smallint, c.priority, 0),
        case when w.payload_factory is null then coalesce(w.payload, '{}') else 'null' end,
        case when w.payload_factory is null then 'stored' else 'deferred' end,
        coalesce(w.options -> 'metadata', '{}') || jsonb_build_object('taskq_schedule', jsonb_strip_nulls(jsonb_build_object(
            'id', w.id, 'name', w.name, 'version', w.version, 'due_at', w.due_at, 'action', w.action,
            'late_seconds', greatest(0, extract(epoch from w.as_of - w.due_at)), 'payload_factory', w.payload_factory))),
        case when w.options ? 'tags' then array(select jsonb_array_elements_text(w.options -> 'tags')) end,
        make_interval(secs => (w.options ->> 'start_to_close')::float8),
        clock_timestamp() + coalesce(make_interval(secs => (w.options ->> 'schedule_to_close')::float8), c.time_budget),
        coalesce((w.options ->> 'max_attempts')::int, c.max_attempts, 3), coalesce(c.retry_kind, 'transient'),
        coalesce(c.retry_backoff, 'exponential'), coalesce(c.retry_base, 5), coalesce(c.retry_cap, 3600),
        coalesce(c.retry_jitter, 0.2), coalesce((w.options ->> 'singleton')::bool, false), w.identity_key,
        w.identity_key is not null, w.capped
    from weighed w
    left join {schema}.actor_config c on c.actor = w.actor
    cross join lateral (select coalesce(w.options ->> 'queue', c.queue, 'default') as queue) q
    where not (w.overlapping or w.doubled or w.crowded)
    order by w.due_at, w.job_id
    on conflict do nothing
    returning id
), noted as (
    insert into {schema}.schedule_occurrences (schedule_id, due_at, decision_id, job_id, outcome)
    select w.id, w.due_at, w.decision_id, m.id,
        case when m.id is not null then 'fired' when w.overlapping then 'overlapped' else 'suppressed' end
    from weighed w left join made m on m.id = w.job_id
    returning decision_id, due_at, job_id
), tally as materialized (
    select decision_id, count(job_id)::int as fired, (count(*) - count(job_id))::int as suppressed,
        max(due_at) filter (where job_id is not null) as last_due,
        (array_agg(job_id order by due_at desc) filter (where job_id is not null))[1] as last_job
    from noted group by decision_id
), outcome as materialized (
    select l.*, coalesce(t.fired, 0) as fired, coalesce(t.suppressed, 0) as suppressed, t.last_due, t.last_job
    from locked l left join tally t on t.decision_id = l.decision_id
), decided as (
    insert into {schema}.schedule_decisions (id, schedule_id, version, action, decided_by, as_of, cursor_from, cursor_to,
        fired, suppressed, skipped)
    select decision_id, id, version, action, $12::uuid, as_of, nullif(next_fire_at, '-infinity'), cursor_to, fired,
        suppressed, skipped
    from outcome
), moved as (
    update {schema}.schedules s set
        next_fire_at = coalesce(o.cursor_to, s.next_fire_at),
        last_fired_at = coalesce(o.last_due, s.last_fired_at), last_job_id = coalesce(o.last_job, s.last_job_id),
        consecutive_failures = case when o.fired > 0 and s.payload_factory is null then 0 else s.consecutive_failures end,
        retry_not_before = case when o.cursor_to is null then s.retry_not_before end,
        claim_token = case when o.cursor_to is null then s.claim_token end,
        claim_expires_at = case when o.cursor_to is null then s.claim_expires_at end
    from outcome o where s.id = o.id
)
select id, fired, suppressed, skipped, case when fired > 0 then extract(epoch from clock_timestamp() - last_due)::float8 end as late,
    (select {schema}.wake() where exists (select from outcome where fired > 0))
from outcome

-- name: prepare_fire
-- For the fire's transaction alone: sessions are pinned for hot statements on the jobs; this one joins long arrays with
-- each other, by a plan that knows how long they are. And one whose client falls asleep in it lets go of its schedules.
select set_config('enable_hashjoin', 'on', true), set_config('plan_cache_mode', 'force_custom_plan', true),
    set_config('idle_in_transaction_session_timeout', '5s', true)
