-- Give a probe permit back with its verdict. It counts only while its lease runs and its round lasts.
-- KEYS[1] state (hash)   KEYS[2] permits (zset)   KEYS[3] window (list)
-- ARGV    1 generation, 2 token, 3 success | failure | release, 4 probes that close it,
--         5 open for (µs), 6 growth, 7 cap (µs), 8 draw, 9 ttl (ms)
-- reply   {1 counted · 0 stale, state, generation, µs to wait}
local held = redis.call('HMGET', KEYS[1], 's', 'g', 'u', 'h', 'k')
local state, gen = held[1] or 'closed', held[2] or ARGV[1]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if state ~= 'half-open' or gen ~= ARGV[1] then
  local left = tonumber(held[3] or '0') - now
  return {0, state, gen, (state == 'open' and left > 0) and left or 0}
end
local lease_end = redis.call('ZSCORE', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[2], ARGV[2])
if not lease_end or tonumber(lease_end) <= now then return {0, state, gen, 0} end
if ARGV[3] == 'release' then return {1, state, gen, 0} end
local next_gen = string.format('%.0f', math.max(tonumber(gen) + 1, now))
if ARGV[3] == 'failure' then
  local nth = tonumber(held[4] or '0') + 1
  local open_for, growth, cap = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  local open = open_for
  if growth > 1 then
    local grown = math.min(cap, open_for * growth ^ (nth - 1))
    open = math.floor(math.max(open_for, grown / 2 + tonumber(ARGV[8]) * grown / 2))
  end
  redis.call('HSET', KEYS[1], 's', 'open', 'g', next_gen, 'h', nth, 'k', 0,
    'o', string.format('%.0f', now), 'u', string.format('%.0f', now + open))
  redis.call('PEXPIRE', KEYS[1], ARGV[9])
  redis.call('DEL', KEYS[2])
  redis.pcall('PUBLISH', KEYS[1], '') -- a hint to the other processes: without the right, they look
  return {1, 'open', next_gen, open}
end
local passed = tonumber(held[5] or '0') + 1
redis.call('PEXPIRE', KEYS[1], ARGV[9])
if passed < tonumber(ARGV[4]) then
  redis.call('HSET', KEYS[1], 'k', passed)
  return {1, state, gen, 0}
end
redis.call('HSET', KEYS[1], 's', 'closed', 'g', next_gen, 'h', 0, 'k', 0, 'n', 0, 'b', 0, 'w', 0)
redis.call('DEL', KEYS[2], KEYS[3])
redis.pcall('PUBLISH', KEYS[1], '')
return {1, 'closed', next_gen, 0}
