-- Ask a shared breaker for one call. A refusal writes nothing but the pruning of ended leases.
-- KEYS[1] state (hash: s state, g generation, u open until, h openings in a row, k probes passed)
-- KEYS[2] permits (zset: token by lease end)
-- ARGV    1 token, 2 lease (µs), 3 probes, 4 ttl (ms), 5 the closed generation last heard of
-- reply   {0 refused · 1 passes freely · 2 has a probe permit, state, generation, µs to wait}
local held = redis.call('HMGET', KEYS[1], 's', 'g', 'u')
local state, gen, until_us = held[1] or 'closed', held[2] or ARGV[5], tonumber(held[3] or '0')
if state == 'closed' or state == 'disabled' then return {1, state, gen, 0} end
if state == 'forced-open' then return {0, state, gen, 0} end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if state == 'open' then
  if now < until_us then return {0, state, gen, until_us - now} end
  redis.call('HSET', KEYS[1], 's', 'half-open', 'k', '0')
  redis.call('DEL', KEYS[2])
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then
    local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
    return {0, 'half-open', gen, tonumber(first[2]) - now}
  end
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {2, 'half-open', gen, 0}
