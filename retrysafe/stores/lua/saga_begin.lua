-- Own a saga: create it, or take on one whose owner is gone.
-- KEYS[1] the saga (hash: o owner, f fence, l lease end, p fingerprint, s status, u due, n number of
--         the last write, d document). Times are µs of the server; l 0: its owner let go of it.
-- ARGV    1 token, 2 run | resume | recover, 3 fingerprint, 4 lease (µs), 5 ttl (ms), 6 document
-- reply   {answer, fence, µs, status, document, number}: 0 nothing there · 1 owned · 2 another owns
--         it (µs: lease left) · 3 over · 4 other arguments · 5 not due (µs: left)
local held = redis.call('HMGET', KEYS[1], 'o', 'f', 'l', 'p', 's', 'u', 'd', 'n')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local lease_end = string.format('%.0f', now + tonumber(ARGV[4]))
if not held[7] then
  if ARGV[2] ~= 'run' then return {0, '0', 0, '', '', 0} end
  local fence = string.format('%.0f', now)
  redis.call('HSET', KEYS[1], 'o', ARGV[1], 'f', fence, 'l', lease_end, 'p', ARGV[3],
    's', 'running', 'u', '0', 'd', ARGV[6], 'n', '0')
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
  return {1, fence, 0, 'running', ARGV[6], 0}
end
if ARGV[2] == 'run' and held[4] ~= ARGV[3] then return {4, held[2], 0, held[5], '', 0} end
local over = held[5] == 'done' or held[5] == 'undone'
if over or (held[5] == 'parked' and ARGV[2] ~= 'resume') then
  return {3, held[2], 0, held[5], held[7], tonumber(held[8])}
end
local until_us, due = tonumber(held[3]), tonumber(held[6])
local mine = held[1] == ARGV[1] and until_us > now
if until_us > now and not mine then return {2, held[2], until_us - now, held[5], held[7], 0} end
if due > now and not mine and ARGV[2] ~= 'resume' then
  return {5, held[2], due - now, held[5], held[7], 0}
end
local fence = held[2]
if not mine then fence = string.format('%.0f', math.max(tonumber(fence) + 1, now)) end
redis.call('HSET', KEYS[1], 'o', ARGV[1], 'f', fence, 'l', lease_end)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return {1, fence, 0, held[5], held[7], tonumber(held[8])}
