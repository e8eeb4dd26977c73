-- Record a result and wake those who wait for it.
-- KEYS[1] the receipt
-- ARGV    1 token, 2 the finished record, 3 ttl (ms), 4 channel prefix, 5 largest record (bytes)
--         that rides in the message, 6 the receipt's name in messages
-- reply   r11: recorded · r12: recorded, ours had vanished · {3, 0, record}: another's record stands ·
--         r10: another is at work, or no receipt of ours
local value = redis.call('GET', KEYS[1])
if not value then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 'r12'
end
if #value < 51 or string.sub(value, 1, 2) ~= 'r1' then return 'r10' end
local state = string.sub(value, 3, 3)
local ours = string.sub(value, 4, 19) == ARGV[1]
if state == 'D' or state == 'N' then
  if ours then return 'r11' end
  return {3, 0, value}
end
if not ours then return 'r10' end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
local message = ARGV[6]
if #ARGV[2] <= tonumber(ARGV[5]) then message = message .. ARGV[2] end
wake(value, ARGV[4], message)
return 'r11'
