-- What is known of a saga. One that is not over is kept longer for being looked at.
-- KEYS[1] the saga (see saga_begin) · ARGV 1 ttl (ms; 0: leave it)
-- reply   {there, status, document, lease left (µs), due in (µs)}
local held = redis.call('HMGET', KEYS[1], 's', 'd', 'l', 'u')
if not held[2] then return {0, '', '', 0, 0} end
if ARGV[1] ~= '0' and held[1] ~= 'done' and held[1] ~= 'undone' then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
return {1, held[1], held[2], math.max(0, tonumber(held[3]) - now),
  math.max(0, tonumber(held[4]) - now)}
