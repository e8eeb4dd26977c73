-- Mark running work abandoned at once, and wake those who wait.
-- KEYS[1] the receipt · ARGV 1 token, 2 channel prefix, 3 the receipt's name in messages
-- reply   r11: marked (or already) · r10: not ours
local value = redis.call('GET', KEYS[1])
if not value then return 'r10' end
local state = string.sub(value, 1, 3)
if (state ~= 'r1R' and state ~= 'r1I') or string.sub(value, 4, 19) ~= ARGV[1] then return 'r10' end
redis.call('SETRANGE', KEYS[1], 2, 'I')
wake(value, ARGV[2], ARGV[3])
return 'r11'
