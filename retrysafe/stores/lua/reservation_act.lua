-- Everything that is done to one item's stock, after what has expired was given back.
-- KEYS[1] the item (hash: n on hand, held included · h held · e when the first hold may end, 0: none
--         is known · s ids after the last sweep · i:<id> = state quantity end, state H held, C confirmed, A added; ends are µs)
-- ARGV    1 hold | confirm | release | add | set | look, 2 id, 3 quantity, 4 how long it is held
--         (µs), 5 how long an ended id is known (µs), 6 ttl (ms)
-- reply   {answer, free, held, µs left}: 1 done, now or before · 2 hold: confirmed before
--         · 0 not enough is free · -1 no such item · -2 no such hold (any more) · -3 that id stands
--         for another quantity · -4 release: confirmed before
local op, quantity, field = ARGV[1], tonumber(ARGV[3]), 'i:' .. ARGV[2]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local function text(number) return string.format('%.0f', number) end
local held = redis.call('HMGET', KEYS[1], 'n', 'h', 'e', 's')
if not held[1] and op ~= 'set' and op ~= 'add' then return {-1, 0, 0, 0} end
local on_hand = tonumber(held[1] or '0')
local held_back, first = tonumber(held[2] or '0'), tonumber(held[3] or '0')

local function parts(value)
  local state, number, ends = string.match(value, '^(%u) (%d+) (%d+)$')
  return state, tonumber(number), tonumber(ends)
end
local size = tonumber(held[4] or '0')
if (first > 0 and first <= now) or redis.call('HLEN', KEYS[1]) > 2 * size + 1000 then
  local all = redis.call('HGETALL', KEYS[1])
  first, size = 0, 0
  for at = 1, #all, 2 do
    if string.sub(all[at], 1, 2) == 'i:' then
      local state, number, ends = parts(all[at + 1])
      if ends <= now then
        if state == 'H' then held_back = held_back - number end
        redis.call('HDEL', KEYS[1], all[at])
      else
        size = size + 1
        if state == 'H' and (first == 0 or ends < first) then first = ends end
      end
    end
  end
end

local answer, left = 1, 0
local known = redis.call('HGET', KEYS[1], field)
local state, number, ends
if known then state, number, ends = parts(known) end
if op == 'hold' then
  if known and (state == 'A' or number ~= quantity) then
    answer = -3
  elseif state == 'C' then
    answer = 2
  elseif state == 'H' then
    left = ends - now
  elseif on_hand - held_back < quantity then
    answer = 0
  else
    left = tonumber(ARGV[4])
    held_back = held_back + quantity
    redis.call('HSET', KEYS[1], field, 'H ' .. text(quantity) .. ' ' .. text(now + left))
    if first == 0 or now + left < first then first = now + left end
  end
elseif op == 'confirm' then
  if state == 'H' then
    on_hand, held_back = on_hand - number, held_back - number
    redis.call('HSET', KEYS[1], field, 'C ' .. text(number) .. ' ' .. text(now + tonumber(ARGV[5])))
  elseif state ~= 'C' then
    answer = -2
  end
elseif op == 'release' then
  if state == 'H' then
    held_back = held_back - number
    redis.call('HDEL', KEYS[1], field)
  else
    answer = (state == 'C') and -4 or -2
  end
elseif op == 'add' then
  if known and (state ~= 'A' or number ~= quantity) then
    answer = -3
  elseif not known then
    on_hand = on_hand + quantity
    redis.call('HSET', KEYS[1], field, 'A ' .. text(quantity) .. ' ' .. text(now + tonumber(ARGV[5])))
  end
elseif op == 'set' then
  if quantity < held_back then answer = 0 else on_hand = quantity end
end
redis.call('HSET', KEYS[1], 'n', text(on_hand), 'h', text(held_back), 'e', text(first),
  's', text(size))
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return {answer, on_hand - held_back, held_back, left}
