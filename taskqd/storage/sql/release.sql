-- The statement that settles what dead workers held; any process of the group may run it.

-- name: release
-- Tombstones the workers and takes back up to $2 of their rows. See the function in the first migration for its locks.
select {schema}.release($1::uuid[], $2::int)
