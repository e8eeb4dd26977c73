-- Lengthen a lease.
-- KEYS[1] the receipt · ARGV 1 token, 2 lease (µs), 3 ttl (ms)
-- reply   {answer, 0, ""}: 1 renewed · 2 nothing there · 0 not ours
local value = redis.call('GET', KEYS[1])
if not value then return {2, 0, ''} end
if string.sub(value, 1, 3) ~= 'r1R' or string.sub(value, 4, 19) ~= ARGV[1] then return {0, 0, ''} end
local time = redis.call('TIME')
local lease_end = tonumber(time[1]) * 1000000 + tonumber(time[2]) + tonumber(ARGV[2])
redis.call('SETRANGE', KEYS[1], 51, string.format('%016.0f', lease_end))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {1, 0, ''}
