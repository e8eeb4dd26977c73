-- Put before the scripts that read a receipt at work (begin, look, peek).
-- Its parts, or nil where the value is none of ours: what can't be read must not be taken over.
local function read_running(value)
  if #value < 85 then return nil end
  local fence, lease_end = string.sub(value, 20, 35), string.sub(value, 52, 67)
  local previous = string.sub(value, 68, 83)
  -- Digits alone: tonumber() reads " 0x1f", "inf" and "nan" as well.
  if not string.find(fence .. lease_end .. previous, '^%d+$') then return nil end
  if tonumber(fence) > 9000000000000000 then return nil end -- not exact: the next would be no other
  local own_end = 84 + string.byte(value, 84)
  local previous_size = string.byte(value, own_end + 1)
  if not previous_size or (previous_size > 0 and tonumber(previous) == 0) then return nil end
  local noted_at = own_end + 2 + previous_size
  if noted_at > #value + 1 or (#value + 1 - noted_at) % 16 ~= 0 then return nil end
  local ids = string.sub(value, 85, own_end) .. string.sub(value, own_end + 2, noted_at - 1)
  if string.find(ids, '[\128-\255]') then return nil end
  return {fence = tonumber(fence), lease_end = tonumber(lease_end), own_end = own_end,
    noted_at = noted_at}
end
