-- Write a result and nudge whoever waits. The first result of a job stands, read or unread.
-- KEYS[1] the result
-- ARGV    1 payload, 2 ttl (ms), 3 channel, 4 message
-- reply   1 it stands (now, or since a write whose reply was lost) · 0 another one does
local mark = '\0retrysafe:taken:'
local old = redis.call('GET', KEYS[1])
if old and old ~= ARGV[1] then return 0 end
if not old then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
-- A user without rights to channels still writes: the readers' poll finds it.
redis.pcall('PUBLISH', ARGV[3], ARGV[4])
return 1
