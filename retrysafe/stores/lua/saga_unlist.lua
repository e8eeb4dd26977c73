-- Take a saga off the list: it is over, or gone.
-- KEYS[1] the list (see saga_list)
-- ARGV    1 id, 2 the µs that were read with it ('': any): who lists it anew in between is heard
-- reply   1 it was on it · 0
if ARGV[2] ~= '' then
  local listed = redis.call('ZSCORE', KEYS[1], ARGV[1])
  if not listed or tonumber(listed) ~= tonumber(ARGV[2]) then return 0 end
end
return redis.call('ZREM', KEYS[1], ARGV[1])
