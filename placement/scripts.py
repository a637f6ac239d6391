"""The Lua scripts of the Redis store: each change is atomic. A script touches only its `KEYS`.

An index is a sorted set of names, scored by the time at which each expires. It expires itself with
its last entry, so a stopped cluster leaves nothing behind. Values of the wrong type read as absent
(`pcall`): a foreign key is overwritten and causes no error.
"""

from __future__ import annotations

_SHARED = """
local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function get(key)
  local value = redis.pcall('GET', key)
  if type(value) == 'string' then return value end
  return nil
end

local function field(value, name)
  if not value then return nil end
  local is_json, entry = pcall(cjson.decode, value)
  if not is_json or type(entry) ~= 'table' then return nil end
  return entry[name]
end

local function to_epoch(value)
  local epoch = tonumber(value or 0) or 0
  if epoch >= 0 and epoch <= 2^53 then return epoch end
  return 0
end

local function held_epoch(key)
  local epoch = field(get(key), 'epoch')
  return type(epoch) == 'number' and to_epoch(epoch) or 0
end

local function index_add(index, names, ttl_ms)
  local now_ms = math.floor(now_us() / 1000)
  redis.call('ZREMRANGEBYSCORE', index, '-inf', now_ms)
  local scored = {}
  for place, name in ipairs(names) do
    scored[2 * place - 1], scored[2 * place] = now_ms + ttl_ms, name
  end
  redis.call('ZADD', index, unpack(scored))
  if redis.call('PTTL', index) < ttl_ms then redis.call('PEXPIRE', index, ttl_ms) end
end
"""

# KEYS: epoch, lease. ARGV: how long to remember it (ms). Returns the new epoch.
# The server's clock in microseconds carries it over an emptied server; the last one given, and the
# one that still holds the lease, carry it over a clock that was set back.
NEXT_EPOCH = (
    _SHARED
    + """
local last = to_epoch(get(KEYS[1]))
local epoch = math.max(last + 1, held_epoch(KEYS[2]) + 1, now_us())
redis.call('SET', KEYS[1], string.format('%.0f', epoch), 'PX', ARGV[1])
return epoch
"""
)

_RENEW = """
local holder = held_epoch(KEYS[1])
if holder > tonumber(ARGV[2]) then return holder end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
index_add(KEYS[2], {ARGV[1]}, tonumber(ARGV[4]))
if to_epoch(get(KEYS[3])) <= tonumber(ARGV[2]) then
  redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[5])
end
return 0
"""

# KEYS: lease, index, epoch. ARGV: node id, epoch, value, lease (ms), how long to remember the epoch
# (ms). Returns 0, or the higher epoch that holds the lease.
HEARTBEAT = _SHARED + _RENEW

# KEYS: as of a heartbeat, then the leases of other nodes. ARGV: as of a heartbeat, then the new
# role. Writes nothing and returns -1 unless one of the others has another role and stays.
TAKE_ROLE = (
    _SHARED
    + """
local function stays(value)
  local role, load = field(value, 'role'), field(value, 'load')
  local drains = type(load) == 'table' and load.is_draining
  return type(role) == 'string' and role ~= ARGV[6] and not drains
end

local is_one_left = false
for place = 4, #KEYS do
  if stays(get(KEYS[place])) then is_one_left = true break end
end
if not is_one_left then return -1 end
"""
    + _RENEW
)

# KEYS: lease, index. ARGV: node id, epoch. The epoch is remembered: by a clock that is set back
# while the node restarts, its next life would be an older one for all who know this one.
LEAVE = (
    _SHARED
    + """
local epoch = tonumber(ARGV[2])
if held_epoch(KEYS[1]) == epoch then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
return 0
"""
)

# KEYS: entries. ARGV: the index of the last byte of each to return: oversized foreign values are
# not transferred. Returns their values, '' for those that are absent or of the wrong type.
READ_VALUES = """
local values = {}
for place, key in ipairs(KEYS) do
  local value = redis.pcall('GETRANGE', key, 0, tonumber(ARGV[1]))
  values[place] = type(value) == 'string' and value or ''
end
return values
"""

# KEYS: index, placements to write, placements to remove. ARGV: router id, ttl (ms), how many to
# write, name and value of each of those, name of each to remove.
RECORD = (
    _SHARED
    + """
local router_id, ttl_ms, num_written = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local written, removed = {}, {}
for place = 1, num_written do
  redis.call('SET', KEYS[1 + place], ARGV[2 * place + 3], 'PX', ttl_ms)
  written[place] = ARGV[2 * place + 2]
end
if num_written > 0 then index_add(KEYS[1], written, ttl_ms) end
for place = num_written + 1, #KEYS - 1 do
  local key, name = KEYS[1 + place], ARGV[3 + num_written + place]
  local value = get(key)
  if not value or field(value, 'router_id') == router_id then
    redis.call('DEL', key)
    removed[#removed + 1] = name
  end
end
if #removed > 0 then redis.call('ZREM', KEYS[1], unpack(removed)) end
return 0
"""
)

_MOVES = (
    _SHARED
    + """
local function last_move(key)
  local number, is_open, what = string.match(get(key) or '', '^(%d+) ([01]) (.+)$')
  return to_epoch(number), is_open == '1', what
end
"""
)

# KEYS: leader, last move. ARGV: this router, lease (ms), how long to remember the move (ms).
# Returns the router that leads, and the last move or ''. A leader without an expiry is not ours.
LEAD = (
    _MOVES
    + """
local holder = get(KEYS[1])
if not holder or holder == ARGV[1] or redis.call('PTTL', KEYS[1]) < 0 then
  holder = ARGV[1]
  redis.call('SET', KEYS[1], holder, 'PX', ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
end
local _, _, what = last_move(KEYS[2])
return {holder, what and get(KEYS[2]) or ''}
"""
)

# KEYS: leader, last move. ARGV: this router, the move, how long to remember it (ms). Returns what
# was written, or '' where another router leads or a move is open. The clock carries the numbers
# over an emptied server, as it does epochs.
BEGIN_MOVE = (
    _MOVES
    + """
local number, is_open = last_move(KEYS[2])
if get(KEYS[1]) ~= ARGV[1] or is_open then return '' end
local value = string.format('%.0f', math.max(number + 1, now_us())) .. ' 1 ' .. ARGV[2]
redis.call('SET', KEYS[2], value, 'PX', ARGV[3])
return value
"""
)

# KEYS: leader, last move. ARGV: this router, the number of the move, how long to remember it (ms).
# Returns 1, or 0 where another router leads or that was not the last move.
END_MOVE = (
    _MOVES
    + """
local number, _, what = last_move(KEYS[2])
if get(KEYS[1]) ~= ARGV[1] or not what or number ~= tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], ARGV[2] .. ' 0 ' .. what, 'PX', ARGV[3])
return 1
"""
)

# KEYS: leader. ARGV: this router.
STOP_LEADING = (
    _SHARED
    + """
if get(KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
"""
)
