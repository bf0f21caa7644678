-- What keeps the tables from growing for ever: bounded batches, each its own transaction, that skip what others hold.

-- name: archive
-- Moves ended jobs with their attempts into the archive: looks at up to $1 in the order of their ends, those after ($2, $3),
-- and takes the ones whose time ($4 succeeded, $5 failed, $6 cancelled, $7 crashed and abandoned, in seconds, or their
-- actor's where that is shorter) is over; not those of a batch that is not complete. They stay there for $8 seconds.
-- Answers how many it looked at and moved, whether others held some, and the last it looked at. Serves from jobs_finished.
with bound as materialized (
    select statement_timestamp() - make_interval(secs => least($4::float8, $5::float8, $6::float8, $7::float8,
        (select extract(epoch from min(c.retention))::float8 from {schema}.actor_config c))) as at
), looked as materialized (
    select j.ctid, j.id, j.finished_at, j.status, j.actor, j.batch_id
    from {schema}.jobs j
    where j.status in ('succeeded', 'failed', 'cancelled', 'crashed', 'abandoned')
      and (j.finished_at, j.id) > ($2::timestamptz, $3::uuid) and j.finished_at <= (select b.at from bound b)
    order by j.finished_at, j.id
    limit $1::int
), due as materialized (
    select l.ctid from looked l left join {schema}.actor_config c on c.actor = l.actor
    where l.finished_at <= statement_timestamp() - least(
            make_interval(secs => case l.status when 'succeeded' then $4::float8 when 'failed' then $5::float8
                                                when 'cancelled' then $6::float8 else $7::float8 end), c.retention)
      and not exists (select from {schema}.batches b where b.id = l.batch_id and b.completed_at is null)
), locked as materialized (
    select j.* from due d join {schema}.jobs j on j.ctid = d.ctid
    where (j.finished_at is not null) is true
    for update of j skip locked
), archived as (
    insert into {schema}.jobs_archive
    select l.*, clock_timestamp(), clock_timestamp() + make_interval(secs => $8::float8) from locked l
    on conflict (id) do nothing
), attempts as (
    insert into {schema}.job_attempts_archive
    select a.*, clock_timestamp() from locked l join {schema}.job_attempts a on a.job_id = l.id
    on conflict (job_id, epoch) do nothing
), deleted as (
    delete from {schema}.jobs j using locked l where j.id = l.id returning 1
)
select (select count(*)::int from looked) as looked, (select count(*)::int from deleted) as done,
    (select count(*) from due) > (select count(*) from deleted) as held, last.finished_at as at, last.id
from (select 1) one left join lateral (
    select l.finished_at, l.id from looked l order by l.finished_at desc, l.id desc limit 1
) last on true

-- name: expire_archive
-- Deletes what has been in the archive for its time, with its attempts. Serves from jobs_archive_expire.
with due as materialized (
    select ctid from {schema}.jobs_archive
    where expire_at <= statement_timestamp()
    order by expire_at
    limit $1::int
    for update skip locked
), deleted as (
    delete from {schema}.jobs_archive a using due d where a.ctid = d.ctid returning 1
)
select count(*)::int from deleted

-- name: prune_events
-- Deletes events older than $2 seconds, in the order of their ids, and remembers the last: whoever reads on from an earlier
-- one has missed some. Primary key.
with due as materialized (
    select e.ctid, e.id, e.occurred_at from {schema}.job_events e order by e.id limit $1::int for update skip locked
), deleted as (
    delete from {schema}.job_events e using due d
    where e.ctid = d.ctid and d.occurred_at < clock_timestamp() - make_interval(secs => $2::float8)
    returning e.id
), remembered as (
    insert into {schema}.maintenance as m (duty, cursor)
    select 'events', jsonb_build_object('pruned_through_id', max(d.id)) from deleted d having count(*) > 0
    on conflict (duty) do update set cursor = jsonb_build_object('pruned_through_id', greatest(
        (m.cursor ->> 'pruned_through_id')::bigint, (excluded.cursor ->> 'pruned_through_id')::bigint))
)
select count(*)::int from deleted

-- name: prune_decisions
-- Deletes decisions on schedules older than $2 seconds, with their occurrences. Serves from schedule_decisions_decided
-- and schedule_occurrences_decision.
with due as materialized (
    select ctid from {schema}.schedule_decisions
    where decided_at < statement_timestamp() - make_interval(secs => $2::float8)
    order by decided_at
    limit $1::int
    for update skip locked
), deleted as (
    delete from {schema}.schedule_decisions s using due d where s.ctid = d.ctid returning s.id
), with_them as (
    delete from {schema}.schedule_occurrences o using deleted d where o.decision_id = d.id
)
select count(*)::int from deleted

-- name: prune_batches
-- Deletes batches that were complete $2 seconds ago and have no job left. Serves from batches_completed.
with due as materialized (
    select b.ctid from {schema}.batches b
    where b.completed_at < statement_timestamp() - make_interval(secs => $2::float8)
      and not exists (select from {schema}.jobs j where j.batch_id = b.id)
    order by b.completed_at
    limit $1::int
    for update skip locked
), deleted as (
    delete from {schema}.batches b using due d where b.ctid = d.ctid returning 1
)
select count(*)::int from deleted

-- name: begin_duty
-- A round of a duty begins. Answers where its last one was broken off. Primary key.
insert into {schema}.maintenance (duty, last_started_at) values ($1::text, clock_timestamp())
on conflict (duty) do update set last_started_at = clock_timestamp()
returning cursor::text

-- name: end_duty
-- A round has ended, or was broken off at a cursor ($2). Primary key.
update {schema}.maintenance set
    cursor = $2::jsonb,
    last_finished_at = case when $2::jsonb is null then clock_timestamp() else last_finished_at end
where duty = $1::text
