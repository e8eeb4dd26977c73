-- Read a receipt without a change.
-- KEYS[1] the receipt · no ARGV
-- reply   r12: nothing · {3, 0, record}: done · {4, µs of lease left, never below zero, record}:
--         running · r17, or {7, 0, what it is}: not a receipt of ours
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind == 'none' then return 'r12' end
if kind ~= 'string' then return {7, 0, kind} end
local value = redis.call('GET', KEYS[1])
if #value < 51 or string.sub(value, 1, 2) ~= 'r1' then return 'r17' end
local state = string.sub(value, 3, 3)
if state == 'D' or state == 'N' then return {3, 0, value} end
if state ~= 'R' and state ~= 'I' then return 'r17' end
local running = read_running(value)
if not running then return 'r17' end
if state == 'I' then return {4, 0, value} end
local time = redis.call('TIME')
local left = running.lease_end - tonumber(time[1]) * 1000000 - tonumber(time[2])
if left < 0 then left = 0 end
return {4, left, value}
