-- Writes the record of a request, unless what is stored is newer or has ended.
-- KEYS[1]  hash of the request
-- ARGV     epoch, attempt, 1 if the new state is terminal, time to live in ms, then field, value, ...
-- Returns  "ok"; "newer" if a higher epoch has written; "stale" if a higher attempt has; "ended" if it has ended and this
--          is not an end.
-- An end on top of an end changes nothing and is "ok": the first one stands. What is no hash is nobody's record.
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then
  redis.call('DEL', KEYS[1])
end
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'attempt', 'state')
if stored[1] then
  if tonumber(stored[1]) > tonumber(ARGV[1]) then
    return 'newer'
  end
  if tonumber(stored[2]) > tonumber(ARGV[2]) then
    return 'stale'
  end
  if stored[3] == 'finished' or stored[3] == 'cancelled' or stored[3] == 'failed' then
    if ARGV[3] == '1' then
      return 'ok'
    end
    return 'ended'
  end
end
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 'ok'
