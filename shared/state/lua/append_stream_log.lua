-- Appends tokens to the log of a resumable answer.
-- KEYS[1]  stream of the answer; every entry begins with session, upto (the tokens so far)
-- ARGV     session, time to live in ms, index of the first token, of the last, tokens
-- Returns  "ok", also when said again; "superseded" by a newer session; "missing" where this does not go on behind what
--          is stored: the log was lost, or an older state of it has come back.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last then
  return 'missing'
end
local fields = last[2]
local session, upto = tonumber(fields[2]), tonumber(fields[4])
if session > tonumber(ARGV[1]) then
  return 'superseded'
end
if session < tonumber(ARGV[1]) or fields[5] == 'outcome' then
  return 'missing'
end
if upto >= tonumber(ARGV[4]) then
  return 'ok'
end
if upto + 1 ~= tonumber(ARGV[3]) then
  return 'missing'
end
redis.call('XADD', KEYS[1], '*', 'session', ARGV[1], 'upto', ARGV[4], 'tokens', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'ok'
