-- The taker has the payload: its tombstone lets go of it.
-- KEYS[1] the result · ARGV 1 token · reply 1, or 0 where the tombstone is another's
local mark = '\0retrysafe:taken:' .. ARGV[1]
if redis.call('GETRANGE', KEYS[1], 0, #mark - 1) ~= mark then return 0 end
redis.call('SET', KEYS[1], mark, 'KEEPTTL')
return 1
