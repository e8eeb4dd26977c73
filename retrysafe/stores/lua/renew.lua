-- Lengthen a lease.
-- KEYS[1] the receipt · ARGV 1 token, 2 lease (µs), 3 ttl (ms)
-- reply   r11: renewed · r12: nothing there · r10: not ours
local value = redis.call('GET', KEYS[1])
if not value then return 'r12' end
if string.sub(value, 1, 3) ~= 'r1R' or string.sub(value, 4, 19) ~= ARGV[1] then return 'r10' end
local time = redis.call('TIME')
local lease_end = tonumber(time[1]) * 1000000 + tonumber(time[2]) + tonumber(ARGV[2])
redis.call('SETRANGE', KEYS[1], 51, string.format('%016.0f', lease_end))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 'r11'
