-- What an operator sees and sets of queues and actors. Whatever is set is noted in admin_audit, in the same statement;
-- workers go by it within 5 seconds.

-- name: queues
-- Every queue that has a rule, jobs that wait, an actor or a worker; `waiting` is counted up to $1. Serves from jobs_claim,
-- one walk a queue.
with recursive routes(route) as (
    (select j.route from {schema}.jobs j where j.status = 'pending' order by j.route limit 1)
    union all
    select (select j.route from {schema}.jobs j where j.status = 'pending' and j.route > r.route order by j.route limit 1)
    from routes r where r.route is not null
), known as (
    select route as name from routes where route is not null
    union select name from {schema}.queues
    union select queue from {schema}.actor_config
    union select unnest(queues) from {schema}.workers
)
select k.name, coalesce(q.mode, 'strict_fifo') as mode, q.max_concurrent, q.paused_at,
    (select count(*) from (select from {schema}.jobs j where j.status = 'pending' and j.route = k.name limit $1::int) w)
        as waiting,
    (select count(*) from {schema}.jobs j where j.status = 'running' and j.route = k.name) as running
from known k left join {schema}.queues q on q.name = k.name
order by k.name

-- name: actors
-- Every actor that a worker has made known. Primary key; running from the small running index.
select c.actor, c.queue, c.max_concurrent, c.max_pending, coalesce(c.reservations, '{}') as reservations,
    (select count(*) from {schema}.jobs j where j.status = 'running' and j.actor = c.actor) as running
from {schema}.actor_config c order by c.actor

-- name: set_queue
-- Stores what is given of a queue; $3, $5 and $7 say whether. Primary key.
with changed as (
    insert into {schema}.queues as q (name, mode, max_concurrent, paused_at)
    values ($1::text, coalesce($2::text, 'strict_fifo'), $4::int, case when $6::bool then clock_timestamp() end)
    on conflict (name) do update set
        mode = case when $3::bool then excluded.mode else q.mode end,
        max_concurrent = case when $5::bool then excluded.max_concurrent else q.max_concurrent end,
        paused_at = case when $7::bool then case when $6::bool then coalesce(q.paused_at, clock_timestamp()) end
                         else q.paused_at end,
        updated_at = clock_timestamp()
    returning q.name, q.mode, q.max_concurrent, q.paused_at
), noted as (
    insert into {schema}.admin_audit (principal, action, target_type, target_id, detail)
    select session_user, 'set', 'queue', c.name,
        jsonb_build_object('mode', c.mode, 'max_concurrent', c.max_concurrent, 'paused', c.paused_at is not null)
    from changed c
)
select name, mode, max_concurrent, paused_at from changed

-- name: set_actor
-- Stores what is given of a known actor; $3, $5 and $7 say whether. Answers nothing for one that no worker has made known.
-- Primary key.
with changed as (
    update {schema}.actor_config c set
        max_concurrent = case when $3::bool then $2::int else c.max_concurrent end,
        max_pending = case when $5::bool then $4::int else c.max_pending end,
        queue = case when $7::bool then $6::text else c.queue end,
        updated_at = clock_timestamp()
    where c.actor = $1::text
    returning c.actor, c.queue, c.max_concurrent, c.max_pending
), noted as (
    insert into {schema}.admin_audit (principal, action, target_type, target_id, detail)
    select session_user, 'set', 'actor', c.actor,
        jsonb_build_object('queue', c.queue, 'max_concurrent', c.max_concurrent, 'max_pending', c.max_pending)
    from changed c
)
select actor, queue, max_concurrent, max_pending from changed
