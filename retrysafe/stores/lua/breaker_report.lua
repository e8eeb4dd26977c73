-- Add calls of a closed breaker to the shared window, and open it at the threshold. With no calls
-- it only reads. Calls of another generation than the present one change nothing.
-- KEYS[1] state (hash: s, g, u, o opened at, h, k; n calls, b failures, w slow in the window)
-- KEYS[2] permits   KEYS[3] window (list of "slice:calls:failures:slow", oldest first)
-- ARGV    1 generation, 2 good calls, 3 failed (0/1), 4 slow (0/1),
--         5 window (calls; 0: by time), 6 window (µs), 7 calls needed, 8 failure rate,
--         9 slow rate (0: none), 10 open for (µs), 11 growth, 12 cap (µs), 13 draw, 14 ttl (ms)
-- reply   {1 counted · 0 not, state, generation, µs to wait}
local held = redis.call('HMGET', KEYS[1], 's', 'g', 'u', 'h', 'n', 'b', 'w')
local state, gen = held[1] or 'closed', held[2] or ARGV[1]
local good, failed, slow = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local event = (failed + slow > 0) and 1 or 0
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
if state ~= 'closed' or gen ~= ARGV[1] or good + event == 0 then
  local left = tonumber(held[3] or '0') - now
  return {0, state, gen, (state == 'open' and left > 0) and left or 0}
end
local function read(entry)
  local slice, calls, bad, late = string.match(entry, '^(%d+):(%d+):(%d+):(%d+)$')
  return tonumber(slice), tonumber(calls), tonumber(bad), tonumber(late)
end
local function write(slice, calls, bad, late)
  return string.format('%.0f:%.0f:%.0f:%.0f', slice, calls, bad, late)
end
local size, width = tonumber(ARGV[5]), tonumber(ARGV[6]) / 20
local slice = size > 0 and 0 or math.floor(now / width)
local n = tonumber(held[5] or '0') + good + event
local b = tonumber(held[6] or '0') + failed
local w = tonumber(held[7] or '0') + slow
-- An entry by count is a run of good calls and then at most one failed or slow one; an entry by
-- time is a slice. The new calls join the last entry where that stays true.
local last = redis.call('LINDEX', KEYS[3], -1)
local joined = false
if last then
  local at, calls, bad, late = read(last)
  if at == slice and (size == 0 or bad + late == 0) then
    redis.call('LSET', KEYS[3], -1, write(at, calls + good + event, bad + failed, late + slow))
    joined = true
  end
end
if not last then n, b, w = good + event, failed, slow end  -- the list was evicted: start anew
if not joined then
  redis.call('RPUSH', KEYS[3], write(slice, good + event, failed, slow))
end
while true do
  local first = redis.call('LINDEX', KEYS[3], 0)
  if not first then break end
  local at, calls, bad, late = read(first)
  if size > 0 then
    local excess = n - size
    if excess <= 0 then break end
    local plain = calls - ((bad + late > 0) and 1 or 0)
    if excess <= plain then
      redis.call('LSET', KEYS[3], 0, write(at, calls - excess, bad, late))
      n = size
      break
    end
  elseif at > slice - 20 then
    break
  end
  redis.call('LPOP', KEYS[3])
  n, b, w = n - calls, b - bad, w - late
end
local rate, slow_rate = tonumber(ARGV[8]), tonumber(ARGV[9])
if event == 1 and n >= tonumber(ARGV[7]) and
   (b >= rate * n or (slow_rate > 0 and w >= slow_rate * n)) then
  local nth = tonumber(held[4] or '0') + 1
  local open_for, growth, cap = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
  local open = open_for
  if growth > 1 then
    local grown = math.min(cap, open_for * growth ^ (nth - 1))
    open = math.floor(math.max(open_for, grown / 2 + tonumber(ARGV[13]) * grown / 2))
  end
  local next_gen = string.format('%.0f', math.max(tonumber(gen) + 1, now))
  redis.call('HSET', KEYS[1], 's', 'open', 'g', next_gen, 'h', nth, 'k', 0, 'n', 0, 'b', 0, 'w', 0,
    'o', string.format('%.0f', now), 'u', string.format('%.0f', now + open))
  redis.call('PEXPIRE', KEYS[1], ARGV[14])
  redis.call('DEL', KEYS[2], KEYS[3])
  redis.pcall('PUBLISH', KEYS[1], '') -- a hint to the other processes: without the right, they look
  return {1, 'open', next_gen, open}
end
redis.call('HSET', KEYS[1], 's', 'closed', 'g', gen, 'n', n, 'b', b, 'w', w)
redis.call('PEXPIRE', KEYS[1], ARGV[14])
redis.call('PEXPIRE', KEYS[3], ARGV[14])
return {1, 'closed', gen, 0}
