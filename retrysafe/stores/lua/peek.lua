-- What people are shown of a receipt: all but its result.
-- KEYS[1] the receipt · no ARGV
-- reply   nil: nothing · {answer, µs of lease left, ms to live (below 0: for ever), bytes, head},
--         answer 3 done, the head ends inside the result · 4 running, the head is all of it · 7 not
--         a receipt of ours
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind == 'none' then return false end
local ttl = redis.call('PTTL', KEYS[1])
if kind ~= 'string' then return {7, 0, ttl, 0, ''} end
local size = redis.call('STRLEN', KEYS[1])
local head = redis.call('GETRANGE', KEYS[1], 0, 306)
local state = string.sub(head, 3, 3)
if string.sub(head, 1, 2) ~= 'r1' then return {7, 0, ttl, size, ''} end
if state == 'D' or state == 'N' then return {3, 0, ttl, size, head} end
if state ~= 'R' and state ~= 'I' then return {7, 0, ttl, size, ''} end
local value = redis.call('GET', KEYS[1])
local running = read_running(value)
if not running then return {7, 0, ttl, size, ''} end
local time = redis.call('TIME')
local left = running.lease_end - tonumber(time[1]) * 1000000 - tonumber(time[2])
return {4, math.max(left, 0), ttl, size, value}
