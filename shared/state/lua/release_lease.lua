-- Gives the scheduler's lease back, if it is still the caller's.
-- KEYS[1]  hash of the lease: holder, address, epoch
-- ARGV     holder
-- Returns  1 if it was given back, 0 if it was not the caller's.
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
return 1
