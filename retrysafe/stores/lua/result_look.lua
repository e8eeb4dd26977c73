-- Look for a result; in mode "take" it is taken in the same step and leaves a tombstone.
-- KEYS[1] the result, by its literal name
-- ARGV    1 "take" or "acknowledge", 2 token of this wait (16), 3 the tombstone's ttl (ms),
--         4 most bytes of a payload, 5 bytes kept of a larger one
-- reply   {state, payload}: 0 not there · 1 there · 2 taken by somebody else · 3 too large (its
--         beginning) · 4 no string
-- A tombstone holds the payload until `result_settle`: the same token may ask again.
local mark = '\0retrysafe:taken:'
local head = redis.pcall('GETRANGE', KEYS[1], 0, #mark + 15)
if type(head) == 'table' then
  if string.find(head['err'], 'WRONGTYPE', 1, true) then return {4, ''} end
  return head
end
if head == '' and redis.call('EXISTS', KEYS[1]) == 0 then return {0, ''} end
if string.sub(head, 1, #mark) == mark then
  if ARGV[1] ~= 'take' or string.sub(head, #mark + 1) ~= ARGV[2] then return {2, ''} end
  return {1, redis.call('GETRANGE', KEYS[1], #mark + 16, -1)}
end
local state, payload, kept = 1, nil, ''
if redis.call('STRLEN', KEYS[1]) > tonumber(ARGV[4]) then
  state, payload = 3, redis.call('GETRANGE', KEYS[1], 0, tonumber(ARGV[5]) - 1)
else
  payload = redis.call('GET', KEYS[1])
  kept = payload
end
if ARGV[1] == 'take' then
  redis.call('SET', KEYS[1], mark .. ARGV[2] .. kept, 'PX', ARGV[3])
end
return {state, payload}
