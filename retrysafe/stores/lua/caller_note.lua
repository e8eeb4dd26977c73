-- Note a receipt among its caller's, of whom there may be so many at a time.
-- KEYS[1] the caller's receipts (zset: digest by the end of its TTL, ms)
-- ARGV    1 digest, 2 ttl (ms; 0: it is none any more), 3 how many there may be
-- reply   0: done, now or before; else the ms until the first of them ends, and nothing was noted
if ARGV[2] == '0' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return 0
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return first[2] and math.max(1, tonumber(first[2]) - now) or 1
end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
-- Others of this caller may last longer.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
