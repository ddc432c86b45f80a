#!/usr/bin/python3
"""The Python module around its calls (the layout of moed.h, finding libmoed.so, lifetimes), and the decode loop.

    python_module_test.py [unittest's arguments]     the environment: see tests/support/python_daemon.py
"""
import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from python_daemon import (CC, CHILD_S, CLIENT, LIBRARY, LOOP, READY_S, SOURCE, Case, Worlds, attach,  # noqa: E402
                           decode_loop, moed, needs_numpy, np, ones, python, table)

STRUCTURES = {"moed_options": moed.Options, "moed_info": moed.RawInfo, "moed_call_t": moed.Call,
              "moed_reply_t": moed.RawReply}


class Layout(unittest.TestCase):
    """The module's structures and numbers are those of moed.h, as a C compiler sees them."""

    def test_sizes_offsets_and_numbers(self):
        numbers = {"MOED_ABI": moed.ABI, "MOED_LAYER_IDENTITY": moed.LAYER_IDENTITY,
                   "MOED_KIND_ROUTED": moed.KIND_ROUTED, "MOED_KIND_LAYER": moed.KIND_LAYER}
        numbers |= {f"MOED_{name}": value for name, value in vars(moed).items() if name.startswith("FLAG_")}
        numbers |= {f"MOED_{status.name}": int(status) for status in moed.Status}
        want = dict(numbers)
        for c_name, structure in STRUCTURES.items():
            want[f"sizeof({c_name})"] = ctypes.sizeof(structure)
            for field, _ in structure._fields_:
                want[f"offsetof({c_name}, {field})"] = getattr(structure, field).offset
                want[f"sizeof((({c_name}*)0)->{field})"] = getattr(structure, field).size
        program = "#include <stddef.h>\n#include <stdio.h>\n#include \"daemon/client/moed.h\"\nint main(void) {\n"
        program += "".join(f'  printf("%s=%llu\\n", "{what}", (unsigned long long)({what}));\n' for what in want)
        with tempfile.TemporaryDirectory() as directory:
            source, binary = os.path.join(directory, "layout.c"), os.path.join(directory, "layout")
            with open(source, "w", encoding="utf-8") as f:
                f.write(program + "  return 0;\n}\n")
            subprocess.run([CC, "-I", SOURCE, source, "-o", binary], check=True, timeout=CHILD_S)
            said = subprocess.run([binary], capture_output=True, text=True, check=True, timeout=CHILD_S).stdout
        self.assertEqual(said.splitlines(), [f"{what}={value}" for what, value in want.items()])
        self.assertGreater(len(want), 100)

    def test_nothing_of_the_header_is_missing(self):
        with open(os.path.join(CLIENT, "moed.h"), encoding="utf-8") as f:
            header = f.read()
        flags = {name: int(value) for name, value in re.findall(r"MOED_(FLAG_\w+) = (\d+)", header)}
        self.assertEqual(flags, {name: value for name, value in vars(moed).items() if name.startswith("FLAG_")})
        statuses = re.findall(r"MOED_(\w+) = (\d+)", header.partition("enum {")[2].partition("};")[0])
        self.assertEqual([(status.name, str(int(status))) for status in moed.Status], statuses)
        for name, structure in STRUCTURES.items():
            code = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
            body = re.search(r"struct \w* ?\{([^}]*)\} " + name + ";", code).group(1)
            fields = re.findall(r"(\w+)(?:\[\w+\])?\s*[,;]", body)
            self.assertEqual([field for field, _ in structure._fields_], fields)


class Replies(unittest.TestCase):
    """A reply's ranks are the bits of two words."""

    def test_ranks(self):
        for ranks in (set(), {0}, {63}, {64}, {127}, {1, 62, 65, 126}, set(range(128))):
            raw = moed.RawReply(number=1, status=moed.Status.PEER_LOST)
            for rank in ranks:
                raw.ranks[rank // 64] |= 1 << rank % 64
            self.assertEqual(moed.Error(raw.status, "a sentence", moed._reply(raw)).ranks, ranks)


class Library(unittest.TestCase):
    """Finding libmoed.so, and saying what is wrong with one that is none."""

    def import_error(self, path):
        done = python("import moed", MOED_LIBRARY=path)
        self.assertEqual(done.returncode, 1)
        last = done.stderr.strip().splitlines()[-1]
        self.assertTrue(last.startswith("ImportError: ") and path in last, done.stderr)
        return last

    def test_none_or_not_one(self):
        self.assertIn("set MOED_LIBRARY", self.import_error("/nowhere/libmoed.so"))
        self.assertIn("moed_abi", self.import_error("libc.so.6"))

    def test_another_abi(self):
        with tempfile.TemporaryDirectory() as directory:
            source, library = os.path.join(directory, "other.c"), os.path.join(directory, "libmoed.so")
            functions = "".join(f"void {name}(void) {{}}\n" for name in moed._FUNCTIONS if name != "moed_abi")
            with open(source, "w", encoding="utf-8") as f:
                f.write("unsigned moed_abi(void) { return 99; }\n" + functions)
            subprocess.run([CC, "-shared", "-fPIC", source, "-o", library], check=True, timeout=CHILD_S)
            self.assertIn("abi 99", self.import_error(library))

    def test_beside_the_module_and_by_the_loader(self):
        code = "import moed; print(moed._library._name)"
        with tempfile.TemporaryDirectory() as directory:
            shutil.copy(os.path.join(CLIENT, "moed.py"), directory)
            shutil.copy(LIBRARY, os.path.join(directory, "libmoed.so"))
            beside = python("import sys; sys.path.insert(0, sys.argv[1]); " + code, directory, MOED_LIBRARY="")
            self.assertEqual(beside.stdout.strip(), os.path.join(directory, "libmoed.so"), beside.stderr)
        by_loader = python(code, MOED_LIBRARY="", LD_LIBRARY_PATH=os.path.dirname(LIBRARY))
        self.assertEqual(by_loader.stdout.strip(), "libmoed.so", by_loader.stderr)


class Installed(Case):
    """What `cmake --install` puts into a prefix works there, and only with what is there."""

    def test_import_from_a_prefix_that_was_moved(self):
        with tempfile.TemporaryDirectory() as directory:
            made, prefix = os.path.join(directory, "made"), os.path.join(os.path.realpath(directory), "prefix")
            subprocess.run([os.environ["MOED_CMAKE"], "--install", os.environ["MOED_BUILD"], "--prefix", made],
                           stdout=subprocess.DEVNULL, check=True, timeout=CHILD_S)
            os.rename(made, prefix)
            packages = os.path.join(prefix, "lib", "python3", "dist-packages")
            done = subprocess.run([sys.executable, "-c", """
import array, os, sys, moed
with moed.attach(sys.argv[1]) as lane:
    def row(code, values):
        return memoryview(array.array(code, values)).cast("B").cast(code, (1, len(values)))
    x, ids, weights = row("H", [0x3F80] * lane.info.latent), row("i", [0, 1, 2]), row("f", [0.5] * 3)
    out = lane.routed(x, ids, weights, moed.LAYER_IDENTITY, norm=False)
    print(hex(out[0, 0]), moed.__file__, os.path.realpath(moed._library._name))
""", self.daemon.socket], env={"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}, cwd=directory,
                                  capture_output=True, text=True, timeout=CHILD_S, check=False)
            self.assertEqual(done.stderr, "")
            answer, module, library = done.stdout.split()
        self.assertEqual((answer, module), ("0x3fc0", os.path.join(packages, "moed.py")))
        self.assertEqual((os.path.basename(library), os.path.commonpath([library, prefix])), ("libmoed.so", prefix))


class Lifetimes(Case):
    """Lanes and arrays that are dropped in any order leave nothing behind and crash nothing."""

    def test_a_collected_lane_is_detached(self):
        lane = moed.attach(self.daemon.socket, name="dropped")
        lane.routed(*ones(1), 1)
        self.assertEqual(self.daemon.lanes(), ["dropped"])
        lane.cycle = lane
        del lane
        gc.collect()
        self.assertEqual(self.daemon.wait_lanes([]), [])

    def test_an_array_outlives_its_lane(self):
        done = python("""
import sys, gc, moed
lane = moed.attach(sys.argv[1])
x, out = (memoryview(a).cast("B") for a in (lane.slot().x, lane.slot().out))
x[0], out[0] = 5, 6
lane.detach()
print(x[0], out[0])
x[0] = 1
for action in (lane.slot, lane.poll, lane.dry, lane.reattach, lambda: lane.call(layer=1, tokens=0)):
    try:
        action()
    except moed.Error as error:
        print(error.name)
second = moed.attach(sys.argv[1])
other = memoryview(second.slot().weights).cast("B")
del second
gc.collect()
other[3] = 2
lane.detach()
del lane
gc.collect()
print(x[0], other[3])
""", self.daemon.socket)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.split(), ["0", "0"] + ["daemon_lost"] * 5 + ["1", "2"])

    def test_a_process_that_just_ends(self):
        done = python("import sys, moed; lane = moed.attach(sys.argv[1]); slot = lane.slot(); "
                      "lane.submit(layer=1, tokens=1)", self.daemon.socket)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.daemon.wait_lanes([]), [])

    def test_an_interrupt_anywhere_leaves_the_lane_usable(self):
        done = python("""
import random, signal, sys, moed
def interrupt(*_):
    raise KeyboardInterrupt
lane, interrupted = moed.attach(sys.argv[1]), 0
signal.signal(signal.SIGALRM, interrupt)
for _ in range(3000):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, 60e-6))
        while True:
            lane.prepare(1, 0)
    except KeyboardInterrupt:
        interrupted += 1
print(interrupted, lane.call(layer=1, tokens=0).status)
lane.detach()
""", self.daemon.socket)
        self.assertEqual((done.stdout.split(), done.stderr), (["3000", "0"], ""))
        self.assertEqual(self.daemon.wait_lanes([]), [])

    def test_nothing_grows(self):
        def held():
            with open("/proc/self/maps", encoding="utf-8") as f:
                return len(os.listdir("/proc/self/fd")), sum("memfd" in line or "/dev/zero" in line for line in f)
        attach(self.daemon.socket).detach()
        gc.collect()
        before = held()
        for _ in range(100):
            with attach(self.daemon.socket) as lane:
                slot = lane.slot()
                memoryview(slot.x).cast("B")[0] = 1
                lane.routed(*ones(2), 1)
        del lane, slot
        gc.collect()
        self.assertEqual(held(), before)

    def test_without_numpy(self):
        done = python("""
import sys, array
sys.modules["numpy"] = None
import moed
with moed.attach(sys.argv[1]) as lane:
    slot, tokens = lane.slot(), 2
    assert isinstance(slot.x, memoryview) and slot.x.format == "H" and len(slot.x) == 64 * lane.info.slot_tokens
    def table(code, values):
        return memoryview(array.array(code, values)).cast("B").cast(code, (tokens, len(values) // tokens))
    x, ids, weights = table("H", [0x3F80] * 128), table("q", [0, 1, 2, 3, -1, -1]), table("f", [0.5] * 6)
    out = lane.routed(x, ids, weights, moed.LAYER_IDENTITY, norm=False)
    print(out.shape, [hex(out[t, i]) for t in (0, 1) for i in (0, 63)])
    slot.ids[:3] = array.array("i", [0, 77, 1])
    try:
        lane.call(layer=1, tokens=1)
    except moed.Error as error:
        print(error.token, error.slot, error.value)
slot.x[0] = 3
""", self.daemon.socket)
        self.assertEqual(done.returncode, 0, done.stderr)
        shape, bad = done.stdout.splitlines()
        self.assertEqual(shape, "(2, 64) ['0x3fc0', '0x3fc0', '0x3f00', '0x3f00']")
        self.assertEqual(bad, "0 1 77")


class Peers(Worlds):
    """A rank that is missing, lost or left out is named; calls that do without it are well."""
    beats = ("heartbeat.interval_ms=50", "heartbeat.lost_after_ms=500", "calls.deadline_ms=300")

    def attach(self, daemon):
        end = time.monotonic() + READY_S
        while not os.path.exists(daemon.socket) and time.monotonic() < end:
            time.sleep(0.01)
        lane = attach(daemon.socket)
        self.addCleanup(lane.detach)
        return lane

    def both(self, lane, **options):
        """A call that needs ranks 0 and 1: rank 1 has the experts from 6 on."""
        x, _, weights = ones(2)
        return lane.routed(x, table("i", [0, 1, 2, 3, 6, 7], 2), weights, moed.LAYER_IDENTITY, norm=False, **options)

    def until(self, lane, status):
        """Repeats that call until it has this status, and returns the Reply or the Error."""
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            try:
                self.both(lane)
                last = lane.reply
            except moed.Error as error:
                last = error
            if last.status == status:
                return last
            time.sleep(0.02)
        return self.fail(f"no call is {status.name}; the last is {last}")

    def test_not_ready_names_who_is_missing(self):
        lane = self.attach(self.world(3, missing=(1,))[0])
        self.assertEqual(self.until(lane, moed.Status.NOT_READY).ranks & {0, 1}, {1})

    def test_a_lost_peer_fails_the_calls_that_need_it(self):
        daemons = self.world(2, *self.beats)
        lane = self.attach(daemons[0])
        self.assertEqual(bytes(self.both(lane)), b"\xC0\x3F" * 128)
        daemons[1].kill()
        self.assertEqual(self.until(lane, moed.Status.PEER_LOST).ranks, {1})
        self.assertFalse(any(bytes(lane.slot().out)[:256]))
        self.assertEqual(bytes(lane.routed(*ones(2), moed.LAYER_IDENTITY, norm=False)), b"\xC0\x3F" * 128)
        daemons[1].start()
        self.until(lane, moed.Status.OK)

    def test_a_lost_peer_is_left_out(self):
        daemons = self.world(2, *self.beats, "calls.on_lost_rank=drop")
        lane = self.attach(daemons[0])
        daemons[1].kill()
        reply = self.until(lane, moed.Status.DEGRADED)
        self.assertEqual((reply.ranks, reply.dropped), ({1}, 1))
        self.assertEqual(bytes(lane.slot().out)[:256], b"\xC0\x3F" * 64 + b"\x00\x3F" * 64)


@needs_numpy
class DecodeLoop(Worlds):
    """deploy/examples/decode_loop.py as a user runs it."""

    def start(self, *arguments):
        command = [sys.executable, LOOP, *arguments]
        loop = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        limit = threading.Timer(CHILD_S, loop.kill)  # ends a read that would wait for ever
        limit.start()
        self.addCleanup(limit.cancel)
        self.addCleanup(loop.wait)
        self.addCleanup(loop.kill)
        self.addCleanup(loop.stdout.close)
        self.addCleanup(loop.stderr.close)
        return loop

    def ends(self, loop, code):
        """What the loop printed; it ends in time with this exit status."""
        out, err = loop.communicate(timeout=CHILD_S)
        self.assertEqual(loop.returncode, code, out + err)
        return out + err

    def test_checked_steps_on_one_and_two_lanes(self):
        daemon = self.world(1)[0]
        usual = ("--socket", daemon.socket, "--steps", "2", "--tokens", "5", "--check")
        said = self.ends(self.start(*usual), 0)
        self.assertRegex(said, r"steps 2  layers 92  tokens 5  lanes 1  [0-9.]+ tokens/s\ncalls: 184 ok\n920 rows are ")
        said = self.ends(self.start(*usual, "--lanes", "2"), 0)
        self.assertRegex(said, r"lanes 2  [0-9.]+ tokens/s\ncalls: 368 ok\n920 rows are ")
        said = self.ends(self.start("--socket", daemon.socket, "--steps", "1", "--layers", "3"), 0)
        self.assertRegex(said, r"layers 3 .*\ncalls: 3 ok\n$")
        self.assertEqual(daemon.wait_lanes([]), [])

    def test_a_restarted_daemon(self):
        daemon = self.world(1, "debug.experts_delay_us=2000", "debug.for_ms=3600000")[0]
        loop = self.start("--socket", daemon.socket, "--steps", "12", "--tokens", "4", "--lanes", "2", "--check")
        self.assertEqual(daemon.wait_lanes(["decode_loop-0", "decode_loop-1"]), ["decode_loop-0", "decode_loop-1"])
        time.sleep(0.5)
        daemon.kill()
        daemon.start()
        said = self.ends(loop, 0)
        self.assertRegex(said, r"decode_loop-0: layer \d+: daemon_lost: .*\ndecode_loop-0: attached again as lane ")
        self.assertIn("decode_loop-1: attached again as lane ", said)
        self.assertIn("calls: 2 daemon_lost, 2208 ok\n4416 rows are ", said)

    def test_a_lost_peer_is_named_and_the_loop_goes_on(self):
        daemons = self.world(2, "heartbeat.interval_ms=50", "heartbeat.lost_after_ms=500", "calls.deadline_ms=300")
        loop = self.start("--socket", daemons[0].socket, "--steps", "1000000", "--tokens", "4", "--check")
        daemons[0].wait_lanes(["decode_loop-0"])
        time.sleep(0.5)
        daemons[1].kill()
        lines = [loop.stdout.readline()]
        daemons[1].start()
        daemons[1].wait_ready()
        while "all ranks answer again" not in lines[-1] and lines[-1]:
            lines.append(loop.stdout.readline())
        time.sleep(0.2)
        loop.send_signal(signal.SIGINT)
        said = "".join(lines) + self.ends(loop, 130)
        self.assertRegex(lines[0], r"^decode_loop-0: layer \d+: peer_(lost|timeout): rank 1\n$")
        self.assertRegex(said, r"all ranks answer again\nsteps \d+  layers 92 .*\ncalls: .*\d+ peer_lost")
        self.assertRegex(said, r"\n[1-9]\d+ rows are the identity layer's, bit for bit\n")

    def test_a_wrong_answer_is_found(self):
        x = decode_loop.to_bf16(np.linspace(-3, 3, 3 * 64).reshape(3, 64))
        ids = np.arange(9, dtype=np.int32).reshape(3, 3)
        batch = decode_loop.Batch.__new__(decode_loop.Batch)
        batch.lane = types.SimpleNamespace(info=types.SimpleNamespace(experts=12, ranks=2))
        batch.inputs, batch.layer, batch.tokens, batch.right = (x, ids, np.full((3, 3), 0.25, np.float32)), 7, 3, 0
        batch.out = decode_loop.identity_answer(*batch.inputs, 12, 2)
        batch.compare()
        self.assertEqual(batch.right, 3)
        batch.out[2, 5] ^= 1
        with self.assertRaisesRegex(decode_loop.Failure, "layer 7: 1 elements are wrong, the first is token 2 elem"):
            batch.compare()

    def test_nobody_there(self):
        said = self.ends(self.start("--socket", "/nowhere/0.sock", "--patience", "0.2"), 1)
        self.assertIn("decode_loop.py: no lane: daemon_lost: ", said)
        self.assertIn("calls: none", said)
        self.assertIn("--tokens", self.ends(self.start("--tokens", "1", "--lanes", "2"), 2))


if __name__ == "__main__":
    unittest.main(verbosity=2)
