-- An operator's word: it starts a new era; permits and counts of before are gone.
-- KEYS[1] state (hash)   KEYS[2] permits (zset)   KEYS[3] window (list)
-- ARGV    1 closed | forced-open | disabled, 2 ttl (ms)
-- reply   {1, state, generation, 0}
local gen = tonumber(redis.call('HGET', KEYS[1], 'g') or '0')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local next_gen = string.format('%.0f', math.max(gen + 1, now))
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 's', ARGV[1], 'g', next_gen)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.pcall('PUBLISH', KEYS[1], '') -- a hint to the other processes: without the right, they look
return {1, ARGV[1], next_gen, 0}
