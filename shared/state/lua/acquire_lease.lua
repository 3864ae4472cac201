-- Takes the scheduler's lease if nobody else holds it, and raises the epoch.
-- KEYS[1]  hash of the lease: holder, address, epoch
-- KEYS[2]  the highest epoch ever given
-- ARGV     holder, address, unix ms, time to live of the lease in ms, of the epoch in ms
-- Returns  the epoch as a string, or "" if another holds the lease.
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder and holder ~= ARGV[1] then
  return ''
end
local highest = tonumber(redis.call('GET', KEYS[2]) or '')
if not (highest and highest < 2 ^ 53) then -- none, or not ours: the wall clock is above all that were given
  highest = 0
end
local epoch = math.max(tonumber(ARGV[3]), highest + 1)
local text = string.format('%.0f', epoch)
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'address', ARGV[2], 'epoch', text)
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SET', KEYS[2], text, 'PX', ARGV[5])
return text
