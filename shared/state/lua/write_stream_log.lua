-- Writes the whole log of a resumable answer, at its start or after it was lost, unless a newer session has it.
-- KEYS[1]  stream of the answer; every entry begins with session, upto (the tokens so far)
-- ARGV     session, time to live in ms, key hash, spec, served form, deadline, upto, tokens ("" = none yet)
-- Returns  "ok", also where the same session has written more already, or the end (this one was on its way for long);
--          "superseded".
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last and tonumber(last[2][2]) > tonumber(ARGV[1]) then
  return 'superseded'
end
if last and tonumber(last[2][2]) == tonumber(ARGV[1]) then
  if tonumber(last[2][4]) > tonumber(ARGV[7]) or last[2][5] == 'outcome' then
    return 'ok'
  end
end
redis.call('DEL', KEYS[1])
redis.call('XADD', KEYS[1], '*', 'session', ARGV[1], 'upto', 0, 'key', ARGV[3], 'spec', ARGV[4], 'served', ARGV[5],
  'deadline', ARGV[6])
if ARGV[8] ~= '' then
  redis.call('XADD', KEYS[1], '*', 'session', ARGV[1], 'upto', ARGV[7], 'tokens', ARGV[8])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'ok'
