-- Lengthen an owner's lease, or end it. A lease that its owner ended is not brought back.
-- KEYS[1] the saga (see saga_begin) · ARGV 1 token, 2 lease (µs; 0: end it), 3 ttl (ms)
-- reply   1 still ours · 0 not ours
local held = redis.call('HMGET', KEYS[1], 'o', 'l')
if held[1] ~= ARGV[1] or held[2] == '0' then return 0 end
local lease_end = '0'
if tonumber(ARGV[2]) > 0 then
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  lease_end = string.format('%.0f', now + tonumber(ARGV[2]))
end
redis.call('HSET', KEYS[1], 'l', lease_end)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
