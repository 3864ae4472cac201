-- Prolongs the scheduler's lease; takes it again under the same epoch where it is gone and nobody came after.
-- KEYS[1]  hash of the lease: holder, address, epoch
-- KEYS[2]  the highest epoch ever given
-- ARGV     holder, address, epoch, time to live of the lease in ms, of the epoch in ms
-- Returns  1 if it is held now, 0 if it is lost.
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder and holder ~= ARGV[1] then
  return 0
end
local highest = tonumber(redis.call('GET', KEYS[2]) or '')
if not (highest and highest < 2 ^ 53) then -- none, or not ours
  highest = 0
end
if highest > tonumber(ARGV[3]) then
  return 0
end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'address', ARGV[2], 'epoch', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[5])
return 1
