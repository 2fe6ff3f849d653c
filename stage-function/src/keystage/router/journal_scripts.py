"""What Redis does in one step, as Lua: the transitions of the journal of keyed requests.

Run by `router.journal_redis` alone. A request has a hash (`fingerprint`, `record`: what was drawn for it,
`owner`: the router that makes its answer, `end` and `body`: how it ended) and a stream of tokens: the
number in an entry's id is how many tokens there are with it, `t` has those of one wave, four bytes each. So
an entry that is written twice is refused by Redis itself. A living router keeps a key of its own
(`router:<incarnation>`) from expiring. Every key shares one hash tag: a cluster keeps them together. Needs
Redis 6.2.
"""

from __future__ import annotations

from keystage.wire.redis_address import Script

OPEN = Script("""
-- KEYS request tokens; ARGV fingerprint record owner expires_ms kept_ms from gone routers
local request, tokens, me = KEYS[1], KEYS[2], ARGV[3]
local held = redis.call('HMGET', request, 'fingerprint', 'record', 'owner', 'end', 'body')
if not held[1] then
  redis.call('DEL', tokens)
  redis.call('HSET', request, 'fingerprint', ARGV[1], 'record', ARGV[2], 'owner', me)
  redis.call('PEXPIRE', request, ARGV[4])
  return {'new'}
end
if held[1] ~= ARGV[1] then return {'other'} end
local entries = redis.call('XRANGE', tokens, string.format('%d', tonumber(ARGV[6]) + 1), '+')
if held[4] then
  redis.call('PEXPIRE', request, ARGV[5])
  redis.call('PEXPIRE', tokens, ARGV[5])
  return {'ended', held[2], entries, held[4], held[5] or ''}
end
local owner = held[3]
if owner ~= '' and owner ~= me and owner ~= ARGV[7] then
  local life = redis.call('GET', ARGV[8] .. owner)
  if life then return {'held', held[2], entries, owner, life} end
end
redis.call('HSET', request, 'owner', me)
redis.call('PEXPIRE', request, ARGV[4])
redis.call('PEXPIRE', tokens, ARGV[4])
local last = redis.call('XREVRANGE', tokens, '+', '-', 'COUNT', 1)[1]
return {'ours', held[2], entries, owner, last and last[1] or '0'}
""")
"""Looks a request up, and takes it where nobody living makes its answer (`gone`: a router known to be dead).

Returns {`new`}, {`other`} (the key is another request's), {`ended`, record, tokens, end, body}, {`held`,
record, tokens, owner, who that is} or {`ours`, record, tokens, former owner, id of the last ones}.
"""

WRITE = Script("""
-- KEYS request tokens, for each; ARGV owner kept_ms, then for each: count tokens what end body
local verdicts = {}
for i = 1, #KEYS / 2 do
  local request, tokens = KEYS[2 * i - 1], KEYS[2 * i]
  local count, packed, what = ARGV[5 * i - 2], ARGV[5 * i - 1], ARGV[5 * i]
  local owner = redis.call('HGET', request, 'owner')
  if not owner then
    verdicts[i] = 2
  elseif owner ~= ARGV[1] then
    verdicts[i] = 0
  else
    if packed ~= '' then
      local added = redis.pcall('XADD', tokens, count .. '-0', 't', packed)
      if added.err and not string.find(added.err, 'equal or smaller') then return added end
      if redis.call('PTTL', tokens) < 0 then
        redis.call('PEXPIRE', tokens, math.max(1, redis.call('PTTL', request)))
      end
    end
    if what == 'end' then
      redis.call('HSET', request, 'end', ARGV[5 * i + 1], 'body', ARGV[5 * i + 2])
      redis.call('PEXPIRE', request, ARGV[2])
      redis.call('PEXPIRE', tokens, ARGV[2])
    elseif what == 'leave' then
      redis.call('HSET', request, 'owner', '')
    elseif what == 'forget' then
      redis.call('DEL', request, tokens)
    end
    verdicts[i] = 1
  end
end
return verdicts
""")
"""Keeps what was made of requests; for each 1: kept, 0: another router owns it, 2: Redis has lost it."""
