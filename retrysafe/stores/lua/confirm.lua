-- A write that changes nothing, on a receipt that is still ours: what WAIT then waits for.
-- (WAIT counts from the connection's last write. A command that was sent again on a new connection
-- may have written on an old one, and WAIT alone would then wait for nothing.)
-- KEYS[1] the receipt · ARGV 1 token
-- reply   1 written · 0 not ours
local value = redis.call('GET', KEYS[1])
if not value or string.sub(value, 1, 2) ~= 'r1' or string.sub(value, 4, 19) ~= ARGV[1] then return 0 end
redis.call('SETRANGE', KEYS[1], 0, 'r1')
return 1
