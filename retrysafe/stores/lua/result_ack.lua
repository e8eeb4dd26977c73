-- Delete a result, if it is still the one that was read.
-- KEYS[1] the result · ARGV 1 SHA-1 of the payload (hex) · reply 1 deleted, 0 another or none
local payload = redis.call('GET', KEYS[1])
if not payload or redis.sha1hex(payload) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
return 1
