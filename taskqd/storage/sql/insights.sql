-- How queues and schedules get on, from what has ended lately and what waits. Reads only; every part is bounded.

-- name: pin
-- For this transaction alone: a backlog that the statistics do not know of must not be sorted.
select set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true),
    set_config('enable_seqscan', 'off', true)

-- name: queues
-- Each queue over the last $1 seconds, by at most the newest $2 jobs that have ended: how many did, how long they waited
-- and ran; what waits, counted up to $3, and for how long what stands in front; what runs; and the slots of the live
-- workers that serve it. A job waits from its time, but not from before it was there: one that fills in a slot of the past
-- has not waited since then. Serves from jobs_finished, jobs_archive_finished, jobs_claim (one probe for each route, lane and priority, at most 10,000) and the
-- small running index.
with recursive heads as (
    (select j.route, j.lane, j.priority, j.scheduled_at, j.created_at, 1 as nth from {schema}.jobs j
     where j.status = 'pending' order by j.route, j.lane, j.priority desc, j.scheduled_at limit 1)
    union all
    select n.route, n.lane, n.priority, n.scheduled_at, n.created_at, h.nth + 1
    from heads h cross join lateral (
        select * from (
            (select j.route, j.lane, j.priority, j.scheduled_at, j.created_at, 1 as step from {schema}.jobs j
             where j.status = 'pending' and j.route = h.route and j.lane = h.lane and j.priority < h.priority
             order by j.priority desc, j.scheduled_at limit 1)
            union all
            (select j.route, j.lane, j.priority, j.scheduled_at, j.created_at, 2 from {schema}.jobs j
             where j.status = 'pending' and (j.route, j.lane) > (h.route, h.lane)
             order by j.route, j.lane, j.priority desc, j.scheduled_at limit 1)
        ) both_ways
        order by step limit 1
    ) n
    where h.nth < 10000
), oldest as (
    select route, min(greatest(scheduled_at, created_at)) as since from heads group by route
), ended as materialized (
    select * from (
        (select j.route, j.status, greatest(j.scheduled_at, j.created_at) as due,
            coalesce(j.started_at, j.claimed_at) as began, j.finished_at
         from {schema}.jobs j
         where j.status in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned')
           and j.finished_at > statement_timestamp() - make_interval(secs => $1::float8)
         order by j.finished_at desc limit $2::int)
        union all
        (select j.route, j.status, greatest(j.scheduled_at, j.created_at), coalesce(j.started_at, j.claimed_at),
            j.finished_at
         from {schema}.jobs_archive j
         where j.finished_at > statement_timestamp() - make_interval(secs => $1::float8)
         order by j.finished_at desc limit $2::int)
    ) live_and_archived
    order by finished_at desc limit $2::int
), seen as (
    select case when count(*) < $2::int then $1::float8
                else greatest(1, extract(epoch from clock_timestamp() - min(finished_at)))::float8 end as seconds
    from ended
), ends as (
    select e.route, count(*) as jobs, count(*) filter (where e.status <> 'succeeded') as badly,
        extract(epoch from clock_timestamp() - min(e.finished_at))::float8 as since,
        coalesce(sum(extract(epoch from e.finished_at - e.began)) filter (where e.began is not null), 0)::float8 as busy,
        (percentile_cont(0.95) within group (order by greatest(0, extract(epoch from e.began - e.due))::float8)
            filter (where e.began is not null))::float8 as wait_p95
    from ended e group by e.route
), runs as (
    select j.route, count(*) as jobs,
        sum(least(extract(epoch from clock_timestamp() - coalesce(j.started_at, j.claimed_at)), $1::float8))::float8 as busy
    from {schema}.jobs j where j.status = 'running' group by j.route
), served as (
    select q.route, count(*) as workers, sum(w.max_concurrency) as slots
    from {schema}.workers w cross join lateral unnest(w.queues) q(route)
    where w.last_seen_at > clock_timestamp() - interval '60 seconds' and w.dead_at is null and w.stopping_at is null
    group by q.route
), known as (
    select route from oldest union select route from ends union select route from runs union select route from served
)
select k.route as queue, (select seconds from seen) as seconds,
    (select count(*) from (select from {schema}.jobs j where j.status = 'pending' and j.route = k.route limit $3::int) w)
        as waiting,
    coalesce(extract(epoch from clock_timestamp() - o.since), 0)::float8 as oldest_wait,
    coalesce(r.jobs, 0) as running, coalesce(e.jobs, 0) as ended, coalesce(e.badly, 0) as ended_badly,
    coalesce(e.since, 0)::float8 as since, (coalesce(e.busy, 0) + coalesce(r.busy, 0))::float8 as busy, e.wait_p95,
    coalesce(s.workers, 0) as workers, coalesce(s.slots, 0) as slots,
    exists (select from {schema}.queues q where q.name = k.route and q.paused_at is not null) as paused
from known k
left join oldest o on o.route = k.route
left join ends e on e.route = k.route
left join runs r on r.route = k.route
left join served s on s.route = k.route
order by k.route

-- name: schedules
-- Fires against clearance: of each schedule's newest $2 jobs how many were fired and have ended in the last $1 seconds, and
-- in as many before; how many have not ended; and the slots that were passed over. Serves from the keys of
-- schedule_occurrences, jobs and jobs_archive, and schedule_decisions_schedule.
with fires as materialized (
    select s.id, o.created_at, coalesce(j.finished_at, a.finished_at) as finished_at,
        coalesce(j.status in ('scheduled', 'pending', 'running'), false) as open
    from {schema}.schedules s
    cross join lateral (
        select o.created_at, o.job_id from {schema}.schedule_occurrences o
        where o.schedule_id = s.id and o.outcome = 'fired'
        order by o.due_at desc limit $2::int
    ) o
    left join {schema}.jobs j on j.id = o.job_id
    left join {schema}.jobs_archive a on a.id = o.job_id
    where s.retired_at is null
), stretch as (
    select statement_timestamp() - make_interval(secs => $1::float8) as lately,
        statement_timestamp() - make_interval(secs => 2 * $1::float8) as before
)
select s.name, s.actor, s.enabled,
    count(f.id) filter (where f.created_at > t.lately) as fired,
    count(f.id) filter (where f.finished_at > t.lately) as cleared,
    count(f.id) filter (where f.created_at > t.before and f.created_at <= t.lately) as fired_before,
    count(f.id) filter (where f.finished_at > t.before and f.finished_at <= t.lately) as cleared_before,
    count(f.id) filter (where f.open) as backlog,
    coalesce(extract(epoch from clock_timestamp() - min(f.created_at) filter (where f.open)), 0)::float8 as oldest_open,
    coalesce((select sum(d.skipped) from {schema}.schedule_decisions d
              where d.schedule_id = s.id and d.decided_at > t.lately), 0) as skipped
from {schema}.schedules s cross join stretch t left join fires f on f.id = s.id
where s.retired_at is null
group by s.id, s.name, s.actor, s.enabled, t.lately, t.before
order by s.name
