-- Put a saga on the list of those that are not over.
-- KEYS[1] the list (zset: id by when to look at it again, µs)
-- ARGV    1 id, 2 in how many µs to look at it (-1: not unasked, it waits for a person), 3 ttl (ms)
-- reply   1
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local look = '9000000000000000'
if tonumber(ARGV[2]) >= 0 then look = string.format('%.0f', now + tonumber(ARGV[2])) end
redis.call('ZADD', KEYS[1], look, ARGV[1])
local dead = now - 2000 * tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', dead))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', 2 * tonumber(ARGV[3])))
return 1
