-- Reads the log of a resumable answer for a new reader and, unless the answer has ended, raises its session: whatever an
-- older one writes from now on is refused.
-- KEYS[1]  stream of the answer; every entry begins with session, upto (the tokens so far)
-- ARGV     key hash, time to live in ms, until when (unix ms by Redis's own clock) this may be done
-- Returns  the reader's session (0 = the answer has ended) and all entries before; nothing where there is no log, or one
--          of another key; "late" where it is too late, and nothing was done.
local now = redis.call('TIME')
if now[1] * 1000 + math.floor(now[2] / 1000) > tonumber(ARGV[3]) then
  return 'late'
end
local entries = redis.call('XRANGE', KEYS[1], '-', '+')
if #entries == 0 or entries[1][2][6] ~= ARGV[1] then
  return {}
end
local fields = entries[#entries][2]
if fields[5] == 'outcome' then
  return {0, entries}
end
local session = tonumber(fields[2]) + 1
redis.call('XADD', KEYS[1], '*', 'session', session, 'upto', fields[4])
if #fields == 4 then -- the reader before has written nothing: however often one comes, the log does not grow
  redis.call('XDEL', KEYS[1], entries[#entries][1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {session, entries}
