-- Gives the scheduler's lease back, if it is still the caller's.
-- KEYS[1]  hash of the lease: holder, address, epoch
-- KEYS[2]  the highest epoch ever given
-- ARGV     holder, highest epoch that its peers have seen, time to live of the epoch in ms
-- Returns  1 if it was given back, 0 if it was not the caller's.
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[1])
local highest = tonumber(redis.call('GET', KEYS[2]) or '')
if not (highest and highest < 2 ^ 53) then -- none, or not ours
  highest = 0
end
if tonumber(ARGV[2]) > highest then
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
end
return 1
