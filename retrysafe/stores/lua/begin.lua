-- Take a receipt, or read it and note who waits.
-- KEYS[1] the receipt
-- ARGV    1 token, 2 fingerprint, 3 lease (µs), 4 ttl (ms), 5 inbox ("" for none),
--         6 "1" to take an abandoned receipt over, 7 own request ID, length-prefixed
-- reply   {answer, number, value}: 1 taken (fence; the record, where it names a predecessor) ·
--         3 done (TTL left in ms, record) · 4 running (µs left, "") · 5 mismatch ·
--         6 abandoned (0, record) · 7 not a receipt of ours
local kind = redis.call('TYPE', KEYS[1])['ok']
if kind ~= 'string' and kind ~= 'none' then return {7, 0, kind} end
local value = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local nobody = string.rep('0', 16)
local previous, previous_id, inboxes = nobody, '\0', ''
local fence = now
if value then
  if #value < 51 or string.sub(value, 1, 2) ~= 'r1' then return {7, 0, ''} end
  local state = string.sub(value, 3, 3)
  local stored = string.sub(value, 36, 51)
  if string.sub(stored, 1, 1) == string.sub(ARGV[2], 1, 1) and stored ~= ARGV[2] then
    return {5, 0, ''}
  end
  if state == 'D' or state == 'N' then return {3, redis.call('PTTL', KEYS[1]), value} end
  if state ~= 'R' and state ~= 'I' then return {7, 0, ''} end
  local running = read_running(value)
  if not running then return {7, 0, ''} end
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
  previous = string.sub(value, 20, 35)
  previous_id = string.sub(value, 84, running.own_end)
  inboxes = string.sub(value, running.noted_at)
  if held >= 9000000000000000 then return {7, 0, ''} end -- the next could not be read
  if held >= fence then fence = held + 1 end
end
local record = 'r1R' .. ARGV[1] .. string.format('%016.0f', fence) .. ARGV[2]
  .. string.format('%016.0f', now + tonumber(ARGV[3])) .. previous .. ARGV[7] .. previous_id .. inboxes
redis.call('SET', KEYS[1], record, 'PX', ARGV[4])
return {1, fence, previous ~= nobody and record or ''}
