"""moed for Python: a thin layer of ctypes over moed.h, which says what every call, field and status means.

    import moed
    with moed.attach("/run/moed/moed/0.sock") as lane:
        out = lane.routed(x, ids, weights, layer=1)          # copies in, calls, copies out
        slot = lane.slot(0)                                  # or in place, without a copy:
        slot.x[:8], slot.ids[:8], slot.weights[:8] = x, ids, weights
        lane.call(layer=1, tokens=8)
        use(slot.out[:8])

libmoed.so is $MOED_LIBRARY, else the one beside this file, else the loader's. Arrays are numpy's when it is there, else
memoryviews, in slots flat ones (no two-dimensional one can be sliced). BF16 is uint16, as numpy has no such type.

Threads: as in moed.h a lane is used by one thread at a time (a second one gets a RuntimeError). Ctrl-C ends a wait
within 50 ms and leaves the call in flight: wait for it again or detach. attach, dry and reattach block up to 5 s.
"""
import collections
import ctypes
import enum
import itertools
import mmap
import os
import struct
import threading
import time

try:
    import numpy
except ImportError:
    numpy = None

ABI = 1
LAYER_IDENTITY = 0xFFFFFFFF
KIND_ROUTED, KIND_LAYER = 0, 1
FLAG_NO_NORM, FLAG_IDS64, FLAG_WEIGHTS16, FLAG_WIRE, FLAG_MASK = 1, 2, 4, 8, 16

_SLICE_S = 0.05  # how long Python's signal handlers may have to wait
_LONGEST_CALL_S = 60.1  # the longest deadline that a daemon can have, and 100 ms for the reply
_u32, _u64, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


# moed.h's structures; Options is moed_options, RawInfo moed_info, Call moed_call_t, RawReply moed_reply_t.
class Options(ctypes.Structure):
    _fields_ = [("size", _u32), ("arena", _u32), ("arena_bytes", _u64), ("device", ctypes.c_int32), ("spin_us", _u32),
                ("dry", _u32), ("model_digest", ctypes.c_char_p), ("name", ctypes.c_char_p)]


class RawInfo(ctypes.Structure):
    _fields_ = [(name, _u32) for name in (
        "size", "abi", "protocol", "numerics", "rank", "ranks", "lane", "hidden", "latent", "intermediate", "experts",
        "top_k", "first_layer", "layers", "max_tokens", "max_call_tokens", "backend", "sharing", "slots", "slot_tokens")
    ] + [("incarnation", _u64), ("arena_bytes", _u64), ("model_digest", ctypes.c_uint8 * 32)]


class Call(ctypes.Structure):
    """One layer for `tokens` tokens; offsets are bytes from the arena's start. Lane.prepare makes one."""
    _fields_ = [("kind", _u32), ("layer", _u32), ("tokens", _u32), ("flags", _u32), ("x", _u64), ("scales", _u64),
                ("ids", _u64), ("weights", _u64), ("out", _u64), ("valid", _u64), ("timeout_us", _u32),
                ("reserved", _u32 * 15)]


class RawReply(ctypes.Structure):
    _fields_ = [("number", _u64), ("status", _u32), ("layer", _u32), ("ranks", _u64 * 2), ("token", _u32),
                ("slot", _u32), ("field", _u32), ("dropped", _u32), ("value", ctypes.c_int64), ("limit", _u64),
                ("total_ns", _u64), ("reserved", _u32 * 14)]


_FUNCTIONS = {
    "moed_abi": (_u32, []),
    "moed_attach": (_u32, [ctypes.c_char_p, ctypes.POINTER(Options), ctypes.POINTER(_pointer)]),
    "moed_get_info": (_u32, [_pointer, ctypes.POINTER(RawInfo)]),
    "moed_arena": (_pointer, [_pointer]),
    "moed_slot": (_u32, [_pointer, _u32, ctypes.POINTER(Call)]),
    "moed_submit": (_u32, [_pointer, ctypes.POINTER(Call)]),
    "moed_wait": (_u32, [_pointer, ctypes.POINTER(RawReply), _u32]),
    "moed_dry": (_u32, [_pointer, ctypes.c_int]),
    "moed_reattach": (_u32, [_pointer]),
    "moed_status_name": (ctypes.c_char_p, [_u32]),
    "moed_last_error": (ctypes.c_char_p, [_pointer]),
    "moed_detach": (None, [_pointer]),
}


def _load():
    """libmoed with the types of its functions; ImportError: there is none, or it is of another version."""
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libmoed.so")
    path = os.environ.get("MOED_LIBRARY") or (beside if os.path.exists(beside) else "libmoed.so")
    try:
        library = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as why:
        raise ImportError(f"{path} is no libmoed that can be loaded ({why}): set MOED_LIBRARY to the path of "
                          f"libmoed.so, or put it beside {__file__}") from why
    if library.moed_abi() != ABI:
        raise ImportError(f"{path} speaks abi {library.moed_abi()}, this module {ABI}: use the moed.py of its version")
    sizes = [ctypes.sizeof(s) for s in (Options, RawInfo, Call, RawReply)]
    if sizes != [48, 128, 128, 128]:
        raise ImportError(f"moed.h's structures have {sizes} bytes here, not 48, 128, 128, 128: use a 64-bit Python")
    return library


_library = _load()
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype, _from_memory.argtypes = ctypes.py_object, [_pointer, ctypes.c_ssize_t, ctypes.c_int]
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype, _libc.mremap.argtypes = _pointer, [_pointer, _u64, _u64, ctypes.c_int, _pointer]

# The statuses as libmoed names them: Status.OK, Status.BAD_ROUTE, ... A daemon may answer numbers beyond them.
_names = (_library.moed_status_name(number).decode().upper() for number in itertools.count())
Status = enum.IntEnum("Status", list(itertools.takewhile(lambda name: name != "UNKNOWN", _names)), start=0)
_ENDED_WELL = (Status.OK, Status.DEGRADED, Status.MASKED, Status.DRY)

# A lane's daemon and its limits: the fields of moed_info, model_digest as bytes.
Info = collections.namedtuple("Info", [field for field, _ in RawInfo._fields_])

# How a call ended: the fields of moed_reply_t, ranks as a set of ranks, field as the name of Call's.
Reply = collections.namedtuple("Reply", [field for field, _ in RawReply._fields_ if field != "reserved"])


def _reply(raw):
    ranks = frozenset(64 * i + bit for i in (0, 1) if raw.ranks[i] for bit in range(64) if raw.ranks[i] >> bit & 1)
    refused = raw.status in (Status.BAD_CALL, Status.UNSUPPORTED) and raw.field < len(Call._fields_)
    return Reply(raw.number, raw.status, raw.layer, ranks, raw.token, raw.slot,
                 Call._fields_[raw.field][0] if refused else None, raw.dropped, raw.value, raw.limit, raw.total_ns)


class Error(Exception):
    """A status that is a failure. str() is libmoed's sentence.

    status and name: which; ranks: the late, lost or missing ranks; token, slot, value: where a bad id is; field, value,
    limit: what is wrong with a call. reply: all of the reply. What a status does not name is None, ranks empty."""

    def __init__(self, status, sentence, reply=None):
        super().__init__(sentence)
        self.status = Status(status) if status in Status._value2member_map_ else status
        self.name = _library.moed_status_name(status).decode()
        self.reply, self.ranks = reply, reply.ranks if reply else frozenset()
        bad_id, refused = reply and status == Status.BAD_ROUTE, reply and reply.field is not None
        self.token, self.slot = (reply.token, reply.slot) if bad_id else (None, None)
        self.field = reply.field if reply else None
        self.value, self.limit = (reply.value, reply.limit) if bad_id or refused else (None, None)


class _Memory:
    """A lane's arena, mapped a second time by Python's own mmap object: it lives as long as an array in it, so an array
    that outlives its lane reads zeros, where libmoed's mapping would be gone and reading it would end the process."""

    def __init__(self, size):
        self.bytes, self._size = mmap.mmap(-1, size), size

    def show(self, address):
        """Maps the pages at `address` here, too: mremap shares them when the old size is 0. 3: to a fixed place."""
        here = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        if _libc.mremap(address, 0, self._size, 3, here) != here:
            number = ctypes.get_errno()
            raise OSError(number, f"the arena of {self._size} bytes cannot be mapped again: {os.strerror(number)}")

    def blank(self):
        """Maps zeros here; the daemon's memory is let go of."""
        zeros = mmap.mmap(-1, self._size)
        self.show(ctypes.addressof(ctypes.c_char.from_buffer(zeros)))

    def array(self, offset, code, shape):
        """A writable array `shape` of elements of struct code `code`, `offset` bytes into the arena."""
        if numpy is not None:
            return numpy.ndarray(shape, code, self.bytes, offset)
        size = shape[0] * shape[1] * struct.calcsize(code)
        return memoryview(self.bytes)[offset:offset + size].cast(code)


# The arrays of a slot: name -> (field of Call, struct code, columns). ids64, weights16 and codes are other forms of
# ids, weights and x in the same place, for the flags IDS64, WEIGHTS16 and WIRE.
_ARRAYS = {"x": ("x", "H", "latent"), "codes": ("x", "B", "latent"), "scales": ("scales", "B", "blocks"),
           "ids": ("ids", "i", "top_k"), "ids64": ("ids", "q", "top_k"), "weights": ("weights", "f", "top_k"),
           "weights16": ("weights", "H", "top_k"), "out": ("out", "H", "latent"), "valid": ("valid", "i", "one")}
Slot = collections.namedtuple("Slot", _ARRAYS)


def attach(socket=None, arena_bytes=0, name=None, dry=False, model_digest=None, spin_us=0):
    """Takes a lane of the daemon that listens on `socket` (None: $MOED_SOCKET, else the only one under /run/moed).

    arena_bytes: 0 is what the daemon allows. name: up to 32 bytes, shown by moectl status. dry: calls are checked and
    answered with zeros. model_digest: 32 bytes, refuses a daemon of another model. spin_us: how long a wait spins
    before it sleeps, 0 is 50. Raises Error as moed_attach has it, ValueError for a digest of another length."""
    if model_digest is not None and len(model_digest) != 32:
        raise ValueError(f"model_digest has {len(model_digest)} bytes, not 32: take it from Lane.info.model_digest")
    options = Options(size=ctypes.sizeof(Options), arena_bytes=arena_bytes, spin_us=spin_us, dry=int(bool(dry)),
                      model_digest=None if model_digest is None else bytes(model_digest),
                      name=name.encode() if name else None)
    path, lane = os.fsencode(socket) if socket is not None else None, _pointer()
    status = _library.moed_attach(path, ctypes.byref(options), ctypes.byref(lane))
    if status != Status.OK:
        raise Error(status, _library.moed_last_error(None).decode(errors="replace"))
    return Lane(lane)


class Lane:
    """One engine's place at one daemon, made by attach(). One call at a time; a context manager that detaches."""

    def __init__(self, handle):
        self._handle, self._lock, self._memory, self._raw = handle, threading.Lock(), None, RawReply()
        self.reply = None  # the Reply of the last call that ended, whatever its status
        self._read_info()
        self._memory = _Memory(self.info.arena_bytes)
        self._memory.show(_library.moed_arena(handle))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.detach()

    def __del__(self, detach=_library.moed_detach):
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            if self._memory is not None:
                self._memory.blank()
        finally:
            detach(handle)

    def detach(self):
        """Gives the lane back; a call in flight is given up. Arrays of its slots read zeros from then on."""
        end = time.monotonic() + 1
        while self._lock.locked() and time.monotonic() < end:
            time.sleep(0.001)
        with self._alone("detach it when that has ended"):
            self.__del__()

    def _alone(self, otherwise):
        """The lane's lock, to be taken by `with`: Ctrl-C after acquire() returned and before `try` would keep it."""
        if self._lock.locked():
            raise RuntimeError(f"this lane is in use by another thread: {otherwise}")
        return self._lock  # two threads that both came so far go one after the other

    def _do(self, function, *arguments):
        """Runs a function of libmoed on this lane."""
        with self._alone("attach one lane per thread"):
            if self._handle is None:
                raise Error(Status.DAEMON_LOST, "this lane is detached: attach again")
            return function(self._handle, *arguments)

    def _checked(self, function, *arguments):
        self._raise(self._do(function, *arguments), None)

    def _raise(self, status, reply, well=(Status.OK,)):
        if status not in well:
            raise Error(status, self._do(_library.moed_last_error).decode(errors="replace"), reply)

    def _read_info(self):
        raw = RawInfo(size=ctypes.sizeof(RawInfo))
        self._checked(_library.moed_get_info, ctypes.byref(raw))
        if raw.size != ctypes.sizeof(RawInfo):
            raise Error(Status.VERSION, f"moed_info has {raw.size} bytes, {ctypes.sizeof(RawInfo)} are known here: use "
                                        "the moed.py of libmoed's version")
        self.info = Info(*(getattr(raw, field) for field in Info._fields[:-1]), bytes(raw.model_digest))

    def slot(self, index=0):
        """The Slot of writable arrays at slot `index` of the arena, each [slot_tokens, columns]; valid is [1, 1]."""
        at, info = self.prepare(0, 0, index, use_valid=True), self.info
        columns = {"latent": info.latent, "blocks": info.latent // 32, "top_k": info.top_k, "one": 1}
        rows = collections.defaultdict(lambda: info.slot_tokens, valid=1)
        return Slot(*(self._memory.array(getattr(at, field), code, (rows[field], columns[width]))
                      for field, code, width in _ARRAYS.values()))

    def prepare(self, layer, tokens, slot=0, flags=0, kind=KIND_ROUTED, timeout_us=0, use_valid=False):
        """A Call on the arrays of `slot`, to be changed or submitted as often as wanted. Without use_valid all tokens
        count, whatever the slot's `valid` says."""
        call = Call()
        self._checked(_library.moed_slot, slot, ctypes.byref(call))
        call.kind, call.layer, call.tokens, call.flags, call.timeout_us = kind, layer, tokens, flags, timeout_us
        call.valid *= use_valid
        return call

    def submit(self, call=None, **fields):
        """Hands over a Call, or the one that prepare(**fields) makes, and returns at once."""
        self._checked(_library.moed_submit, ctypes.byref(call if call is not None else self.prepare(**fields)))

    def _collect(self, status):
        """The Reply of an ended call, None for one that has not ended; every other status raises."""
        if status == Status.PENDING:
            return None
        self.reply = _reply(self._raw) if self._raw.number else None  # none where libmoed itself found the failure
        self._raise(status, self.reply, _ENDED_WELL)
        return self.reply

    def poll(self):
        """The Reply, or None while the call is in flight. Raises Error for a call that failed."""
        return self.wait(0)

    def wait(self, timeout=_LONGEST_CALL_S):
        """As poll, but waits up to `timeout` seconds; None when the call is still in flight then."""
        end = time.monotonic() + timeout
        self._raw.number = 0
        while True:
            left = min(max(end - time.monotonic(), 0), _SLICE_S)
            status = self._do(_library.moed_wait, ctypes.byref(self._raw), int(left * 1e6))
            if status != Status.PENDING or time.monotonic() >= end:
                return self._collect(status)

    def call(self, call=None, **fields):
        """submit, then wait for the call's timeout and 100 ms (without one: for the longest that a daemon may have).
        Raises Error, with Status.PENDING when the call is still in flight."""
        call = call if call is not None else self.prepare(**fields)
        self.submit(call)
        limit = min(call.timeout_us / 1e6 + 0.1, _LONGEST_CALL_S) if call.timeout_us else _LONGEST_CALL_S
        reply = self.wait(limit)
        if reply is None:
            raise Error(Status.PENDING, f"the call has not ended after {limit:.1f} s: wait for it, or detach")
        return reply

    def dry(self, on=True):
        """Makes the lane dry or not."""
        self._checked(_library.moed_dry, int(bool(on)))

    def reattach(self):
        """After Status.DAEMON_LOST: takes a lane of the daemon that listens there now. Arrays stay usable: zeros."""
        try:
            self._checked(_library.moed_reattach)
            self._read_info()
        finally:
            arena = self._do(_library.moed_arena)
            self._memory.show(arena) if arena else self._memory.blank()

    def routed(self, x, ids, weights, layer, scales=None, norm=True, mask=False, slot=0, timeout_us=0, out=None):
        """A routed call on copies: out = experts(x), BF16 [T, L].

        Each array is anything with a two-dimensional buffer or a contiguous CPU tensor with data_ptr(). x: BF16
        [T, L], with `scales` (uint8 [T, L / 32]) E4M3. ids: int32 or int64 [T, K]. weights: float32 or BF16 [T, K].
        out: where to copy the result, else a new tensor like x where x is a BF16 tensor, else a new uint16 array.
        Raises Error for a call that failed, TypeError and ValueError for arrays that do not fit."""
        info, wire = self.info, scales is not None
        _, data, (tokens, _) = _bytes("x", x, "B" if wire else "H", info.latent)
        if tokens > info.slot_tokens:
            raise ValueError(f"x has {tokens} tokens, a slot of this lane holds {info.slot_tokens}: send fewer at a "
                             "time, or raise the daemon's limits.arena_mb")
        call = self.prepare(layer, tokens, slot, timeout_us=timeout_us)
        call.flags = FLAG_WIRE * wire | FLAG_NO_NORM * (not norm) | FLAG_MASK * mask
        parts = [(call.x, data)]
        for field, source, codes, width, other in (("ids", ids, "iq", info.top_k, FLAG_IDS64),
                                                   ("weights", weights, "fH", info.top_k, FLAG_WEIGHTS16),
                                                   ("scales", scales, "B", info.latent // 32, 0))[:3 if wire else 2]:
            code, data, _ = _bytes(field, source, codes, width, tokens)
            call.flags |= other * (code == codes[-1])
            parts.append((getattr(call, field), data))
        target, out = _target(x, out, tokens, info.latent)
        for offset, data in parts:
            self._memory.bytes[offset:offset + len(data)] = data
        self.call(call)
        if tokens:
            target[:] = memoryview(self._memory.bytes)[call.out:call.out + len(target)]
        return out


# Struct codes by the names of tensors' dtypes, and by a buffer's own code and size of an element.
_DTYPES = {"bfloat16": "H", "uint16": "H", "int16": "H", "int32": "i", "int64": "q", "float32": "f", "uint8": "B",
           "float8_e4m3fn": "B"}
_BUFFERS = {"H2": "H", "h2": "H", "i4": "i", "l4": "i", "l8": "q", "q8": "q", "f4": "f", "B1": "B"}


def _bytes(name, source, codes, width, tokens=None):
    """(struct code, memoryview of bytes in C order, shape) of an array [tokens, width] of one of `codes`. The bytes of
    a buffer that is not contiguous, or in no native format, are a read-only copy."""
    if hasattr(source, "data_ptr"):
        device = str(getattr(source, "device", "cpu"))
        if device != "cpu" or not source.is_contiguous():
            raise ValueError(f"{name} is a tensor on {device} or not contiguous: use {name}.cpu().contiguous()")
        dtype, shape = str(source.dtype).rpartition(".")[2], tuple(source.shape)
        code, size = _DTYPES.get(dtype, dtype), source.numel() * source.element_size()
        view = _from_memory(source.data_ptr(), size, 0x200) if size else memoryview(b"")  # 0x200: writable
    else:
        view = memoryview(source)
        code, shape = _BUFFERS.get(f"{view.format.lstrip('@=<')}{view.itemsize}", view.format), view.shape
    if code not in codes:
        raise TypeError(f"{name} has elements of type {code!r}, allowed are {' and '.join(codes)} "
                        "(H uint16 holding BF16, f float32, i int32, q int64, B uint8)")
    if len(shape) != 2 or shape[1] != width or tokens not in (None, shape[0]):
        want = f"({'T' if tokens is None else tokens}, {width})"
        raise ValueError(f"{name} has shape {tuple(shape)}, it has to be {want}")
    if 0 in shape or not view.c_contiguous or len(view.format) > 1:  # memoryview.cast takes none of these
        view = memoryview(view.tobytes())
    return code, view.cast("B"), shape


def _target(x, out, tokens, latent):
    """(memoryview of the result's bytes, what the caller gets)."""
    if out is None and "bfloat16" in str(getattr(x, "dtype", "")) and hasattr(x, "new_empty"):
        out = x.new_empty(x.shape)
    elif out is None and numpy is None:
        data = memoryview(bytearray(tokens * latent * 2))
        return data, data.cast("H", (tokens, latent)) if tokens else data.cast("H")
    elif out is None:
        out = numpy.empty((tokens, latent), "H")
    _, data, _ = _bytes("out", out, "H", latent, tokens)
    if data.readonly and tokens:
        raise ValueError("out has to be writable, contiguous and in this machine's byte order")
    return data, out
