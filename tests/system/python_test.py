#!/usr/bin/python3
"""The Python module's calls against real daemons: every answer is right to the bit or has the named status.

    python_test.py [unittest's arguments]     the environment: see tests/support/python_daemon.py
"""
import os
import signal
import sys
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from python_daemon import (SHAPE, SMALL, Case, attach, decode_loop, moed, needs_numpy, np, ones, rows,  # noqa: E402
                           table)

LATENT, EXPERTS, TOP_K = SHAPE["latent"], SHAPE["experts"], SHAPE["top_k"]
IDENTITY = moed.LAYER_IDENTITY


class Tensor:
    """What the module asks of a CPU tensor of torch, over bytes of its own."""

    def __init__(self, shape, dtype, size, data=b"", contiguous=True, device="cpu"):
        self.shape, self.dtype, self.device, self._size, self._contiguous = shape, dtype, device, size, contiguous
        self.memory = (moed.ctypes.c_char * (self.numel() * size)).from_buffer(bytearray(data or self.numel() * size))

    def numel(self):
        return self.shape[0] * self.shape[1]

    def element_size(self):
        return self._size

    def is_contiguous(self):
        return self._contiguous

    def data_ptr(self):
        return moed.ctypes.addressof(self.memory)

    def new_empty(self, shape):
        return Tensor(shape, self.dtype, self._size)


@needs_numpy
class Answers(Case):
    """Right answers: identity element by element, experts against the bits of another lane."""

    def identity(self, x, ids, weights):
        return decode_loop.identity_answer(x, ids, weights, EXPERTS, 1)

    def test_info(self):
        info = self.attach().info
        self.assertEqual({name: getattr(info, name) for name in SHAPE}, SHAPE)
        self.assertEqual((info.abi, info.rank, info.ranks, info.slots), (1, 0, 1, 2))
        self.assertEqual((info.max_tokens, info.max_call_tokens), (16, 200))
        self.assertEqual((info.arena_bytes, info.first_layer, len(info.model_digest)), (4 << 20, 1, 32))

    def test_identity_in_every_form(self):
        lane = self.attach()
        for tokens in (0, 1, 2, 16, 17, 199, 200):
            x, ids, weights = rows(tokens, tokens)
            narrow = decode_loop.to_bf16(weights)
            want, want_narrow = self.identity(x, ids, weights), self.identity(x, ids, decode_loop.from_bf16(narrow))
            for given in (ids, ids.astype(np.int64)):
                self.same(lane.routed(x, given, weights, IDENTITY, norm=False), want)
                self.same(lane.routed(x, given, narrow, IDENTITY, norm=False), want_narrow)
                self.assertEqual(lane.reply.status, moed.Status.OK)
        self.assertEqual(lane.reply.number, 7 * 4)

    def test_norm_is_rms_norm(self):
        x, ids, weights = rows(9, 3)
        ids[4] = -1
        out = self.attach().routed(x, ids, weights, IDENTITY)
        total = decode_loop.from_bf16(self.identity(x, ids, weights)).astype(np.float64)
        want = total / np.sqrt((total ** 2).mean(axis=1, keepdims=True) + 1e-5)
        got = decode_loop.from_bf16(out)
        self.assertFalse(out[4].any())
        self.assertLessEqual((np.abs(got - want) - np.abs(want) * 2.0 ** -7).max(), 0)  # one unit in the last place

    def test_experts_have_the_bits_of_another_lane(self):
        first, second = self.attach(), self.attach()
        x, ids, weights = rows(40, 5)
        outs = [first.routed(x, ids, weights, layer) for layer in (1, 2)]
        self.assertTrue((outs[0] != outs[1]).any())
        slot, head = second.slot(1), 7  # in place, in the other slot, and in two calls
        for layer, out in zip((1, 2), outs):
            for rows_of in (slice(0, head), slice(head, 40)):
                count = rows_of.stop - rows_of.start
                slot.x[:count], slot.ids[:count], slot.weights[:count] = x[rows_of], ids[rows_of], weights[rows_of]
                self.assertEqual(second.call(layer=layer, tokens=count, slot=1).layer, layer)
                self.assertTrue((slot.out[:count] == out[rows_of]).all())
        self.assertTrue(((outs[0] & 0x7FFF) > 0).any(axis=1)[(ids >= 0).any(axis=1)].all())

    def test_slots_do_not_overlap(self):
        lane = self.attach()
        slots = [lane.slot(i) for i in range(lane.info.slots)]
        for number, slot in enumerate(slots):
            for part, name in enumerate(("x", "scales", "ids64", "weights", "out", "valid")):
                getattr(slot, name)[:] = 10 * number + part
        for number, slot in enumerate(slots):
            for part, name in enumerate(("x", "scales", "ids64", "weights", "out", "valid")):
                self.assertTrue((getattr(slot, name) == 10 * number + part).all(), name)
        self.fails(moed.Status.BAD_CALL, lane.slot, 2)

    def test_valid_tokens(self):
        lane, (x, ids, weights) = self.attach(), rows(8, 6)
        slot = lane.slot()
        self.assertEqual(slot.valid[0, 0], 0x7FFFFFFF)
        slot.x[:8], slot.ids[:8], slot.weights[:8], slot.valid[:] = x, ids, weights, 5
        lane.call(layer=IDENTITY, tokens=8, flags=moed.FLAG_NO_NORM, use_valid=True)
        self.same(slot.out[:5].copy(), self.identity(x, ids, weights)[:5])
        self.assertFalse(slot.out[5:8].any())
        lane.call(layer=IDENTITY, tokens=8, flags=moed.FLAG_NO_NORM)
        self.same(slot.out[:8].copy(), self.identity(x, ids, weights))

    def test_wire_format_and_mask(self):
        lane, (_, ids, weights) = self.attach(), rows(4, 7)
        codes, scales = np.full((4, LATENT), 0x38, np.uint8), np.full((4, LATENT // 32), 128, np.uint8)  # 1 times 2
        two = np.full((4, LATENT), 0x4000, np.uint16)
        got = lane.routed(codes, ids, weights, IDENTITY, scales=scales, norm=False)
        self.same(got, self.identity(two, ids, weights))
        ids[2, 1], good = 99, ids.copy()
        good[2, 1] = -1
        self.same(lane.routed(two, ids, weights, IDENTITY, norm=False, mask=True), self.identity(two, good, weights))
        reply = lane.reply
        self.assertEqual((reply.status, reply.token, reply.slot, reply.value), (moed.Status.MASKED, 2, 1, 99))

    def test_tensors_strides_and_out(self):
        lane, (x, ids, weights) = self.attach(), rows(6, 8)
        want = self.identity(x, ids, weights)
        tensor = Tensor(x.shape, "torch.bfloat16", 2, x.tobytes())
        out = lane.routed(tensor, Tensor(ids.shape, "torch.int64", 8, ids.astype(np.int64).tobytes()),
                          Tensor(weights.shape, "torch.float32", 4, weights.tobytes()), IDENTITY, norm=False)
        self.assertIsInstance(out, Tensor)
        self.assertEqual(bytes(out.memory), lane.routed(x, ids, weights, IDENTITY, norm=False).tobytes())
        wide = np.zeros((6, 2 * LATENT), np.uint16)
        wide[:, ::2] = x  # every other column: not contiguous
        target = np.zeros_like(x)
        self.assertIs(lane.routed(wide[:, ::2], ids, weights, IDENTITY, norm=False, out=target), target)
        self.same(target, want)
        for bad in ({"contiguous": False}, {"device": "cuda:0"}):
            with self.assertRaisesRegex(ValueError, "contiguous"):
                lane.routed(Tensor(x.shape, "torch.bfloat16", 2, **bad), ids, weights, IDENTITY)

    def test_arrays_that_do_not_fit(self):
        lane, (x, ids, weights) = self.attach(), rows(4)
        frozen = x.copy()
        frozen.setflags(write=False)
        for error, part, arguments in (
                (TypeError, "x has elements", (x.astype(np.float32), ids, weights)),
                (TypeError, "ids has elements", (x, ids.astype(np.uint16), weights)),
                (TypeError, "ids has elements", (x, ids.astype(">i4"), weights)),
                (TypeError, "weights has elements", (x, ids, weights.astype(np.float64))),
                (ValueError, r"x has shape \(4, 63\)", (x[:, 1:], ids, weights)),
                (ValueError, r"ids has shape \(3, 3\), it has to be \(4, 3\)", (x, ids[1:], weights)),
                (ValueError, "weights has shape", (x, ids, weights[:, :2])),
                (ValueError, "out has to be writable", (x, ids, weights, IDENTITY, None, True, False, 0, 0, frozen)),
                (ValueError, "a slot of this lane holds", rows(lane.info.slot_tokens + 1))):
            with self.assertRaisesRegex(error, part):
                lane.routed(*(arguments if len(arguments) > 3 else (*arguments, IDENTITY)))
        self.same(lane.routed(x, ids, weights, IDENTITY, norm=False), self.identity(x, ids, weights))

    def test_two_threads_with_two_lanes(self):
        failed = []

        def work(seed):
            try:
                with attach(self.daemon.socket) as lane:
                    for i in range(200):
                        x, ids, weights = rows(i % 20, 1000 * seed + i)
                        self.same(lane.routed(x, ids, weights, IDENTITY, norm=False), self.identity(x, ids, weights))
            except Exception as error:  # told by the thread that asserts
                failed.append(error)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            self.assertFalse(thread.is_alive())
        self.assertEqual(failed, [])


class Refusals(Case):
    """What is wrong is named: the status, and the fields that the status has."""

    def test_bad_routes(self):
        lane = self.attach()
        for code, values in (("i", (12, -2, 2**31 - 1, -2**31)), ("q", (12, 2**32, 2**63 - 1, -2**63))):
            for value in values:
                x, _, weights = ones(5)
                ids = table(code, [0, 1, 2] * 5, 5)
                ids[3, 1] = value
                error = self.fails(moed.Status.BAD_ROUTE, lane.routed, x, ids, weights, IDENTITY)
                self.assertEqual((error.token, error.slot, error.value, error.limit), (3, 1, value, EXPERTS - 1))
                self.assertEqual((error.field, error.ranks), (None, frozenset()))
                self.assertIn(str(value), str(error))
                self.assertFalse(any(bytes(lane.slot().out)[:5 * LATENT * 2]))
        lane.routed(*ones(5), 1)

    def test_bad_calls(self):
        lane, arena = self.attach(), self.attach().info.arena_bytes
        good = dict(layer=1, tokens=4)
        for field, value, limit in [("kind", 2, 1), ("layer", 0, 2), ("layer", 3, 2), ("tokens", 201, 200),
                                    ("flags", 32, 31), ("timeout_us", 60_000_001, 60_000_000)] + [
                                        (name, value, None) for name in ("x", "ids", "weights", "out", "valid")
                                        for value in (8, arena, 2**63)]:
            call = lane.prepare(**good)
            setattr(call, field, value)
            error = self.fails(moed.Status.BAD_CALL, lane.call, call)
            self.assertEqual((error.field, error.value % 2**64, error.token, error.slot), (field, value, None, None))
            if limit is not None:
                self.assertEqual(error.limit, limit)
            self.assertIn(field, str(error))
        call = lane.prepare(**good)
        call.reserved[14] = 1
        self.assertEqual(self.fails(moed.Status.BAD_CALL, lane.call, call).field, "reserved")
        error = self.fails(moed.Status.UNSUPPORTED, lane.call, kind=moed.KIND_LAYER, **good)
        self.assertEqual((error.field, error.reply.value), ("kind", 1))
        self.fails(moed.Status.BAD_CALL, self.attach().poll)
        self.assertEqual(lane.call(**good).status, moed.Status.OK)

    def test_attach(self):
        socket = self.daemon.socket
        self.assertIn("/nowhere", str(self.fails(moed.Status.DAEMON_LOST, moed.attach, "/nowhere/0.sock")))
        self.fails(moed.Status.BAD_CALL, moed.attach, "/" + "a" * 200)
        self.fails(moed.Status.BAD_CALL, moed.attach, socket, spin_us=1_000_001)
        self.fails(moed.Status.NO_MEMORY, moed.attach, socket, arena_bytes=1 << 30)
        wrong = self.fails(moed.Status.VERSION, moed.attach, socket, model_digest=bytes(range(32)))
        self.assertIn("model digest 0001020304050607", str(wrong))
        for length in (0, 31, 33):
            with self.assertRaisesRegex(ValueError, f"has {length} bytes"):
                moed.attach(socket, model_digest=bytes(length))
        digest = self.attach(name="one").info.model_digest
        self.attach(name="two", model_digest=bytearray(digest)), self.attach(name="x" * 40, arena_bytes=1 << 20)
        self.assertEqual(self.daemon.lanes(), ["one", "two", "x" * 32])
        self.fails(moed.Status.BUSY, moed.attach, socket)

    def test_dry(self):
        lane = self.attach(dry=True)
        out = lane.routed(*ones(3), 1)
        self.assertEqual((lane.reply.status, any(bytes(out))), (moed.Status.DRY, False))
        self.assertEqual(self.fails(moed.Status.BAD_CALL, lane.call, layer=9, tokens=1).field, "layer")
        lane.dry(False)
        lane.routed(*ones(3), 1)
        self.assertEqual(lane.reply.status, moed.Status.OK)
        lane.dry()
        lane.routed(*ones(3), 1)
        self.assertEqual(lane.reply.status, moed.Status.DRY)


class Slow(Case):
    """Calls that last: in flight, interrupted, expired, and losing their daemon."""
    sets = SMALL + ["debug.experts_delay_us=400000", "debug.for_ms=3600000"]

    def test_poll_wait_and_busy(self):
        lane = self.attach()
        call = lane.prepare(1, 1)
        began = time.monotonic()
        lane.submit(call)
        self.assertIsNone(lane.poll())
        self.assertIsNone(lane.wait(0.06))
        self.assertGreaterEqual(time.monotonic() - began, 0.06)
        self.assertIn("in flight", str(self.fails(moed.Status.BUSY, lane.submit, call)))
        self.assertEqual(lane.wait().status, moed.Status.OK)
        self.assertGreaterEqual(time.monotonic() - began, 0.4)
        self.assertEqual((lane.poll().number, lane.reply.number), (1, 1))

    def test_a_timeout_names_the_late_rank(self):
        lane = self.attach()
        began = time.monotonic()
        error = self.fails(moed.Status.PEER_TIMEOUT, lane.routed, *ones(2), 1, timeout_us=50_000)
        self.assertLess(time.monotonic() - began, 0.3)
        self.assertEqual((error.ranks, error.token, error.field, error.value), ({0}, None, None, None))

    def test_ctrl_c_ends_a_wait_and_leaves_the_call(self):
        lane = self.attach()
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        began = time.monotonic()
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            lane.call(layer=1, tokens=1)
        self.assertLess(time.monotonic() - began, 0.3)
        self.assertEqual(lane.wait().status, moed.Status.OK)
        self.assertEqual(lane.call(layer=1, tokens=0).number, 2)

    def test_another_thread_is_turned_away(self):
        lane = self.attach()
        lane.submit(layer=1, tokens=1)
        waiter = threading.Thread(target=lane.wait)
        waiter.start()
        turned_away = 0
        while waiter.is_alive():
            try:
                lane.poll()
            except RuntimeError as error:
                self.assertIn("one lane per thread", str(error))
                turned_away += 1
        waiter.join()
        self.assertGreater(turned_away, 0)
        self.assertEqual(lane.poll().status, moed.Status.OK)

    def test_detach_in_mid_call(self):
        before = self.daemon.lanes()
        with moed.attach(self.daemon.socket, name="leaver") as lane:
            lane.submit(layer=1, tokens=1)
            self.assertIn("leaver", self.daemon.lanes())
        self.assertEqual(self.daemon.wait_lanes(before), before)
        self.assertIn("detached", str(self.fails(moed.Status.DAEMON_LOST, lane.wait)))
        lane.detach()


@needs_numpy
class Deaths(Case):
    """The daemon is killed in mid-call and comes back."""
    sets = Slow.sets

    def test_killed_in_mid_call_and_attached_again(self):
        lane = self.attach(name="survivor")
        slot, before = lane.slot(), lane.info
        slot.x[0, 0] = 7
        self.assertEqual(lane.call(layer=1, tokens=0).number, 1)
        self.fails(moed.Status.BUSY, lane.reattach)
        self.assertEqual(slot.x[0, 0], 7)
        lane.submit(layer=1, tokens=1)
        self.assertIsNone(lane.wait(0.02))
        self.daemon.kill()
        killed = time.monotonic()
        error = self.fails(moed.Status.DAEMON_LOST, lane.wait)
        self.assertLess(time.monotonic() - killed, 1)
        self.assertEqual((error.reply, lane.reply, error.ranks), (None, None, frozenset()))
        self.fails(moed.Status.DAEMON_LOST, lane.submit, layer=1, tokens=1)
        self.fails(moed.Status.DAEMON_LOST, lane.reattach)
        slot.x[0, 1] = 8  # no daemon, but memory
        self.daemon.start()
        self.daemon.wait_ready()
        lane.reattach()
        self.assertNotEqual(lane.info.incarnation, before.incarnation)
        self.assertEqual(lane.info._replace(incarnation=before.incarnation), before)
        self.assertEqual((slot.x[0, 0], slot.x[0, 1], slot.valid[0, 0]), (0, 0, 0x7FFFFFFF))
        x, ids, weights = ones(1)
        slot.x[:1], slot.ids[:1], slot.weights[:1] = x, ids, weights
        lane.call(layer=IDENTITY, tokens=1, flags=moed.FLAG_NO_NORM)
        self.assertEqual(set(bytes(slot.out[:1])), {0xC0, 0x3F})  # the array made before sees the new daemon's 1.5
        self.assertEqual(self.daemon.lanes(), ["survivor"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
