-- Put before the scripts that end a receipt's work (finish, release, interrupt, forget).
-- Wakes those who wait: `value` is the running receipt, `channels` the prefix of their inboxes.
local function wake(value, channels, message)
  local own = string.byte(value, 84)
  local previous = own and string.byte(value, 85 + own)
  if not previous then return end
  for from = 86 + own + previous, #value, 16 do
    -- A user without rights to channels still records: the waiters' poll finds it.
    redis.pcall('PUBLISH', channels .. string.sub(value, from, from + 15), message)
  end
end
