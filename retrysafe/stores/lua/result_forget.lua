-- Delete a result, or the tombstone of one.
-- KEYS[1] the result · reply 1 deleted, 0 there was none
return redis.call('DEL', KEYS[1])
