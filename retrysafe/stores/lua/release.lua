-- Give a receipt up and wake those who wait, so that one of them takes over.
-- KEYS[1] the receipt · ARGV 1 token, 2 channel prefix, 3 the receipt's name in messages
-- reply   r11: released (or already gone) · r10: not ours
local value = redis.call('GET', KEYS[1])
if not value then return 'r11' end
local state = string.sub(value, 1, 3)
if (state ~= 'r1R' and state ~= 'r1I') or string.sub(value, 4, 19) ~= ARGV[1] then return 'r10' end
redis.call('DEL', KEYS[1])
wake(value, ARGV[2], ARGV[3])
return 'r11'
