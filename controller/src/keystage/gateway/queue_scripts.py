"""What Redis does in one step, as Lua: the asynchronous queue's transitions.

Run by `gateway.queue_redis` alone. Per function there is a stream of calls with one consumer group
(`calls:<function>`) and a sorted set of calls that wait for their next attempt (`later:<function>`, scored
by Unix milliseconds of the server's clock). `functions` names those that have any, `bytes` counts what each
holds, `dead` is the stream of given-up calls. Every key shares one hash tag: a cluster keeps them together.

A transition out of the pending list acts only if the entry is in it: whoever settles second does nothing.
Needs Redis 6.2 (XPENDING with IDLE).
"""

from __future__ import annotations

from keystage.wire.redis_address import Script

_ADD = """
local function add(stream, functions, bytes, group, bell, name, payload)
  if redis.call('SADD', functions, name) == 1 then
    redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
  end
  local id = redis.call('XADD', stream, '*', 'call', payload)
  redis.call('HINCRBY', bytes, name, #payload)
  redis.call('PUBLISH', bell, name)
  return id
end
"""

PUT = Script(
    _ADD
    + """
-- KEYS stream later functions bytes; ARGV group bell function payload max_entries max_bytes
local calls = redis.call('XLEN', KEYS[1]) + redis.call('ZCARD', KEYS[2])
local own, all = 0, 0
local held = redis.call('HGETALL', KEYS[4])
for i = 1, #held, 2 do
  all = all + tonumber(held[i + 1])
  if held[i] == ARGV[3] then own = tonumber(held[i + 1]) end
end
if calls >= tonumber(ARGV[5]) or own + #ARGV[4] > tonumber(ARGV[6]) - all then
  return {0, calls, own, all}
end
add(KEYS[1], KEYS[3], KEYS[4], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
return {1, calls, own, all}
"""
)
"""Takes a call in if it fits (`gateway.queue.Bounds`): {accepted, calls, own bytes, all bytes} before it."""

TAKE = Script("""
-- KEYS stream later, for each function; ARGV group consumer lease_ms claims, then room of each function
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local group, consumer, lease = ARGV[1], ARGV[2], ARGV[3]
local taken, due = {}, -1
for i = 1, #KEYS / 2 do
  local stream, later, room = KEYS[2 * i - 1], KEYS[2 * i], tonumber(ARGV[4 + i])
  local found = {}
  for _, payload in ipairs(redis.call('ZRANGEBYSCORE', later, '-inf', now, 'LIMIT', 0, room)) do
    local added = redis.pcall('XADD', stream, '*', 'call', payload)
    if type(added) == 'table' and added.err then break end  -- no memory: it stays where it is
    redis.call('ZREM', later, payload)
  end
  local first = redis.call('ZRANGE', later, 0, 0, 'WITHSCORES')
  if first[2] then
    local left = math.max(0, tonumber(first[2]) - now)
    if due < 0 or left < due then due = left end
  end
  if ARGV[4] == '1' then
    local lost = redis.pcall('XPENDING', stream, group, 'IDLE', lease, '-', '+', room)
    if not lost.err then
      for _, p in ipairs(lost) do
        local got = redis.call('XCLAIM', stream, group, consumer, lease, p[1])
        if got[1] then
          found[#found + 1] = {p[1], got[1][2], p[4]}
        else
          redis.call('XACK', stream, group, p[1])  -- deleted by hand
        end
      end
    end
  end
  if #found < room then
    local new = redis.pcall(
      'XREADGROUP', 'GROUP', group, consumer, 'COUNT', room - #found, 'STREAMS', stream, '>')
    if new and new.err then
      if redis.call('EXISTS', stream) == 1 then
        redis.pcall('XGROUP', 'CREATE', stream, group, '0')
      end
    elseif new then
      for _, e in ipairs(new[1][2]) do found[#found + 1] = {e[1], e[2], 0} end
    end
  end
  taken[i] = found
end
return {due, taken}
""")
"""Moves what is due, claims what its consumer left, reads what is new.

Returns {milliseconds to the next due call or -1, for each function a list of {entry, fields, losses}}.
"""

SETTLE = Script("""
-- KEYS stream later functions bytes dead; ARGV group bell function entry what, then
--   again: delay_ms payload; bury: reason max_dead
local stream, later, functions, bytes, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local name, entry, what = ARGV[3], ARGV[4], ARGV[5]
local found = redis.call('XRANGE', stream, entry, entry)
local pending = redis.pcall('XPENDING', stream, ARGV[1], entry, entry, 1)
if pending.err or not pending[1] or not found[1] then return 0 end
-- What may be refused for want of memory comes first: then nothing has changed.
local size = 0
local fields = found[1][2]
for i = 2, #fields, 2 do size = size + #fields[i] end
if what == 'again' then
  local t = redis.call('TIME')
  local due = t[1] * 1000 + math.floor(t[2] / 1000) + tonumber(ARGV[6])
  redis.call('ZADD', later, due, ARGV[7])
  size = size - #ARGV[7]
elseif what == 'bury' then
  if #fields > 200 then fields = {'call', 'not kept: no call has so many fields'} end
  fields[#fields + 1] = 'function'
  fields[#fields + 1] = name
  fields[#fields + 1] = 'reason'
  fields[#fields + 1] = ARGV[6]
  redis.call('XADD', dead, 'MAXLEN', ARGV[7], '*', unpack(fields))
end
redis.call('XACK', stream, ARGV[1], entry)
redis.call('XDEL', stream, entry)
-- Refused for want of memory, the sum is too high until the function has no calls.
local left = redis.pcall('HINCRBY', bytes, name, string.format('%d', -size))
if type(left) == 'number' and left < 0 then redis.call('HSET', bytes, name, 0) end
if redis.call('XLEN', stream) == 0 and redis.call('ZCARD', later) == 0 then
  redis.call('DEL', stream)
  redis.call('SREM', functions, name)
  redis.call('HDEL', bytes, name)
end
if what == 'again' then redis.call('PUBLISH', ARGV[2], name) end
return 1
""")
"""Takes a call out of the pending list: finished, to be tried again, or dead. 1: it was there."""

RENEW = Script("""
-- KEYS streams; ARGV group consumer, then for each lease: number of its stream, entry
local group, consumer = ARGV[1], ARGV[2]
local lost = {}
for i = 3, #ARGV, 2 do
  local stream, entry = KEYS[tonumber(ARGV[i])], ARGV[i + 1]
  local mine = redis.pcall('XPENDING', stream, group, entry, entry, 1, consumer)
  if mine.err or not mine[1] then
    lost[#lost + 1] = entry
  else
    redis.call('XCLAIM', stream, group, consumer, 0, entry, 'JUSTID')
  end
end
return lost
""")
"""Restarts the time of leases that are still ours; the entries that are not."""

TIDY = Script("""
-- KEYS streams; ARGV group leaving idle_ms
local gone = 0
for _, stream in ipairs(KEYS) do
  local found = redis.pcall('XINFO', 'CONSUMERS', stream, ARGV[1])
  if not found.err then
    for _, row in ipairs(found) do
      local c = {}
      for i = 1, #row, 2 do c[row[i]] = row[i + 1] end
      if c.pending == 0 and (c.name == ARGV[2] or c.idle > tonumber(ARGV[3])) then
        redis.call('XGROUP', 'DELCONSUMER', stream, ARGV[1], c.name)
        gone = gone + 1
      end
    end
  end
end
return gone
""")
"""Removes consumers without pending entries (with one its entries would go): that which leaves, and silent
ones. A living one that was removed is made anew by the next thing that it takes."""

DEPTH = Script("""
-- KEYS stream later, for each function
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local out = {}
for i = 1, #KEYS / 2 do
  local first = redis.call('XRANGE', KEYS[2 * i - 1], '-', '+', 'COUNT', 1)
  local age = 0
  if first[1] then age = math.max(0, now - tonumber(string.match(first[1][1], '^%d+'))) end
  out[i] = {redis.call('XLEN', KEYS[2 * i - 1]) + redis.call('ZCARD', KEYS[2 * i]), age}
end
return out
""")
"""For each function {calls, age of the oldest in milliseconds}."""

REPLAY = Script(
    _ADD
    + """
-- KEYS stream dead functions bytes; ARGV group bell function payload entry
if not redis.call('XRANGE', KEYS[2], ARGV[5], ARGV[5])[1] then return 0 end
add(KEYS[1], KEYS[3], KEYS[4], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
redis.call('XDEL', KEYS[2], ARGV[5])
return 1
"""
)
"""Puts a dead letter back into its function's queue. 1: it was there."""
