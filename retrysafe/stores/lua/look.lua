-- Read a receipt without a change.
-- KEYS[1] the receipt · no ARGV
-- reply   {answer, number, value}: 2 nothing · 3 done · 4 running (µs of lease left, never
--         below zero) · 7 not a receipt of ours
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind == 'none' then return {2, 0, ''} end
if kind ~= 'string' then return {7, 0, kind} end
local value = redis.call('GET', KEYS[1])
if #value < 51 or string.sub(value, 1, 2) ~= 'r1' then return {7, 0, ''} end
local state = string.sub(value, 3, 3)
if state == 'D' or state == 'N' then return {3, 0, value} end
if state ~= 'R' and state ~= 'I' then return {7, 0, ''} end
local running = read_running(value)
if not running then return {7, 0, ''} end
if state == 'I' then return {4, 0, value} end
local time = redis.call('TIME')
local left = running.lease_end - tonumber(time[1]) * 1000000 - tonumber(time[2])
if left < 0 then left = 0 end
return {4, left, value}
