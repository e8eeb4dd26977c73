-- Note a receipt among its caller's, of whom there may be so many at a time.
-- KEYS[1] the caller's receipts (zset: digest by the end of its TTL, ms)
-- ARGV    1 digest, 2 ttl (ms; 0: it is none any more), 3 how many there may be (0: any number),
--         4 the end that this owner noted before (0: none): another's entry is left as it is
-- reply   {1, end}: done, now or before · {0, ms until the first ends}: there are as many as may be
local noted = redis.call('ZSCORE', KEYS[1], ARGV[1])
if ARGV[4] ~= '0' and tonumber(noted or 0) ~= tonumber(ARGV[4]) then return {1, 0} end
if ARGV[2] == '0' then
  redis.call('ZREM', KEYS[1], ARGV[1])
  return {1, 0}
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local most, ends = tonumber(ARGV[3]), now + tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if not noted and most > 0 and redis.call('ZCARD', KEYS[1]) >= most then
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return {0, math.max(1, tonumber(first[2]) - now)}
end
redis.call('ZADD', KEYS[1], ends, ARGV[1])
-- Others of this caller may last longer.
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return {1, ends}
