-- Which sagas to look at. Changes nothing.
-- KEYS[1] the list (see saga_list)
-- ARGV    1 due | all, 2 how many to skip, 3 how many at most
-- reply   id, µs, id, µs, …: the longest due first, µs as saga_unlist takes them
local last = '+inf'
if ARGV[1] == 'due' then
  local time = redis.call('TIME')
  last = string.format('%.0f', tonumber(time[1]) * 1000000 + tonumber(time[2]))
end
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', last, 'WITHSCORES', 'LIMIT', ARGV[2],
  ARGV[3])
for at = 2, #found, 2 do found[at] = string.format('%.0f', tonumber(found[at])) end
return found
