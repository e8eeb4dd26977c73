-- Everything that is done to the retry budget of one job's step. What was refused changes nothing,
-- but for the giving up; every change begins the key's time anew.
-- KEYS[1] the budget (hash: n retries spent · a the attempt whose consumer may decide · g "1" given
--         up · r the token of the last requeue · t:<token> one spent by that token)
-- ARGV    1 spend | requeue | give_up | look, 2 the caller's attempt (0: it names none), 3 token
--         (a repeat carries the same), 4 limit, 5 ttl (ms)
-- reply   {answer, spent, attempt, given up}: answer 1 yes, now or before · 0 no · 2 no, and this
--         call gave the job up
local op, attempt, token = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local limit = tonumber(ARGV[4])
local held = redis.call('HMGET', KEYS[1], 'n', 'a', 'g', 'r')
-- A field that is no number makes the comparisons below fail, and so the call: never a yes.
local spent, at = tonumber(held[1] or '0'), tonumber(held[2] or '1')
local given_up = held[3] == '1'
local answer, changed = 0, false
local function text(number) return string.format('%.0f', number) end

if op == 'look' then
  answer = held[1] and 1 or 0
elseif given_up then
  answer = (op == 'give_up') and 1 or 0
elseif op == 'give_up' then
  at = math.max(at, attempt)
  if attempt == 0 or attempt == at then
    given_up, changed, answer = true, true, 1
  end
elseif op == 'spend' then
  at = math.max(at, attempt) -- a message knows what a lost record doesn't
  if attempt == 0 then
    if redis.call('HGET', KEYS[1], 't:' .. token) then
      answer = 1
    elseif spent < limit then
      spent, changed, answer = spent + 1, true, 1
      redis.call('HSET', KEYS[1], 't:' .. token, '')
    else
      given_up, changed, answer = true, true, 2
    end
  elseif attempt == at then
    changed = true
    if attempt > limit then
      given_up, answer = true, 2
    else
      spent, answer = math.max(spent, attempt), 1
    end
  end
elseif attempt == at then
  changed = true
  if attempt > limit then
    given_up, answer = true, 2
  else
    spent, at, answer = math.max(spent, attempt), attempt + 1, 1
    redis.call('HSET', KEYS[1], 'r', token)
  end
elseif attempt == at - 1 and held[4] == token then
  answer = 1
end

if changed then
  redis.call('HSET', KEYS[1], 'n', text(spent), 'a', text(at), 'g', given_up and '1' or '0')
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
return {answer, spent, at, given_up and 1 or 0}
