-- Marks the log of a resumable answer as ended: from now on it can be read and not be taken over.
-- KEYS[1]  stream of the answer; every entry begins with session, upto (the tokens so far)
-- ARGV     session, time to live in ms, number of tokens, outcome
-- Returns  "ok", also where it has ended already: the first end stands; "superseded" by a newer session; "missing" where
--          the tokens are not all there.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last then
  return 'missing'
end
local fields = last[2]
if tonumber(fields[2]) > tonumber(ARGV[1]) then
  return 'superseded'
end
if fields[5] == 'outcome' then
  return 'ok'
end
if tonumber(fields[2]) < tonumber(ARGV[1]) or fields[4] ~= ARGV[3] then
  return 'missing'
end
redis.call('XADD', KEYS[1], '*', 'session', ARGV[1], 'upto', fields[4], 'outcome', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'ok'
