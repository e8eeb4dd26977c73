-- Write down how far a saga is. Only its owner's word counts, and each only once.
-- KEYS[1] the saga (see saga_begin)
-- ARGV    1 token, 2 number of this write, 3 status, 4 document, 5 due in (µs), 6 lease (µs; 0: its
--         owner lets go of it), 7 ttl (ms)
-- reply   1 written, now or before · 0 not ours
local held = redis.call('HMGET', KEYS[1], 'o', 'n')
if held[1] ~= ARGV[1] then return 0 end
if tonumber(held[2]) >= tonumber(ARGV[2]) then return 1 end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local due, lease_end = '0', '0'
if tonumber(ARGV[5]) > 0 then due = string.format('%.0f', now + tonumber(ARGV[5])) end
if tonumber(ARGV[6]) > 0 then lease_end = string.format('%.0f', now + tonumber(ARGV[6])) end
redis.call('HSET', KEYS[1], 'n', ARGV[2], 's', ARGV[3], 'd', ARGV[4], 'u', due, 'l', lease_end)
redis.call('PEXPIRE', KEYS[1], ARGV[7])
return 1
