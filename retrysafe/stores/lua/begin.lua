-- Take a receipt, or read it and note who waits.
-- KEYS[1] the receipt
-- ARGV    1 token, 2 fingerprint, 3 lease (µs), 4 ttl (ms), 5 inbox ("" for none),
--         6 "1" to take an abandoned receipt over, 7 own request ID, length-prefixed
-- reply   r11 and the fence: taken · {1, fence, record}: taken, the record names a predecessor ·
--         {3, TTL left in ms, record}: done · {4, µs left, ""}: running · r15: mismatch ·
--         {6, 0, record}: abandoned · r17, or {7, 0, what it is}: not a receipt of ours
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local nobody = '0000000000000000'
local function record(fence_text, previous, previous_id, inboxes)
  return 'r1R' .. ARGV[1] .. fence_text .. ARGV[2]
    .. string.format('%016.0f', now + tonumber(ARGV[3])) .. previous .. ARGV[7] .. previous_id .. inboxes
end
-- Most calls are the first of their key: that costs one write, and no look.
local now_text = string.format('%016.0f', now)
local set = redis.pcall('SET', KEYS[1], record(now_text, nobody, '\0', ''), 'NX', 'PX', ARGV[4])
if set and set['ok'] then return 'r11' .. now_text end
local value = redis.pcall('GET', KEYS[1])
if not value then return set end -- a server that takes no write
if type(value) == 'table' then return {7, 0, value['err']} end
if #value < 51 or string.sub(value, 1, 2) ~= 'r1' then return 'r17' end
local state = string.sub(value, 3, 3)
local stored = string.sub(value, 36, 51)
if string.sub(stored, 1, 1) == string.sub(ARGV[2], 1, 1) and stored ~= ARGV[2] then return 'r15' end
if state == 'D' or state == 'N' then return {3, redis.call('PTTL', KEYS[1]), value} end
if state ~= 'R' and state ~= 'I' then return 'r17' end
local running = read_running(value)
if not running then return 'r17' end
local lease_end, held = running.lease_end, running.fence
if string.sub(value, 4, 19) == ARGV[1] and state == 'R' then
  return {1, held, string.sub(value, 68, 83) ~= nobody and value or ''}
end
if state == 'R' and lease_end > now then
  local inbox = ARGV[5]
  if inbox ~= '' then
    local known = false
    for at = running.noted_at, #value, 16 do
      if string.sub(value, at, at + 15) == inbox then known = true; break end
    end
    if not known then redis.call('APPEND', KEYS[1], inbox) end
  end
  return {4, lease_end - now, ''}
end
if ARGV[6] ~= '1' then return {6, 0, value} end
if held >= 9000000000000000 then return 'r17' end -- the next could not be read
local fence = now
if held >= fence then fence = held + 1 end
local taken = record(string.format('%016.0f', fence), string.sub(value, 20, 35),
  string.sub(value, 84, running.own_end), string.sub(value, running.noted_at))
redis.call('SET', KEYS[1], taken, 'PX', ARGV[4])
return {1, fence, taken}
