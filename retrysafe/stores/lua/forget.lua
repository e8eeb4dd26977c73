-- Delete a receipt, whatever its state, and wake those who wait for it.
-- KEYS[1] the receipt
-- ARGV    1 channel prefix, 2 the receipt's name in messages, 3 channel of those that keep records
-- reply   r11: deleted · r12: nothing there
redis.pcall('PUBLISH', ARGV[3], ARGV[2])
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind == 'none' then return 'r12' end
local value = kind == 'string' and redis.call('GET', KEYS[1]) or ''
redis.call('DEL', KEYS[1])
local state = string.sub(value, 1, 3)
if state == 'r1R' or state == 'r1I' then wake(value, ARGV[1], ARGV[2]) end
return 'r11'
