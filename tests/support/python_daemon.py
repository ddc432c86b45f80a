"""What the tests of the Python module share: the module, real daemons, random calls, and their comparisons.

The environment says where things are: MOED_BINARY, MOECTL_BINARY, MOED_LIBRARY, MOED_CC (a C compiler), MOED_CMAKE and
MOED_BUILD (the build that is installed from).
"""
import array
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

SOURCE = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
CLIENT, LOOP = os.path.join(SOURCE, "daemon", "client"), os.path.join(SOURCE, "deploy", "examples", "decode_loop.py")
MOED, MOECTL, LIBRARY, CC = (os.environ[n] for n in ("MOED_BINARY", "MOECTL_BINARY", "MOED_LIBRARY", "MOED_CC"))
READY_S, CHILD_S = 30, 60  # deadlines
sys.dont_write_bytecode = True
sys.path.insert(0, CLIENT)

import moed  # noqa: E402

try:
    import numpy as np
except ImportError:
    np = decode_loop = None
else:
    spec = importlib.util.spec_from_file_location("decode_loop", LOOP)
    decode_loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(decode_loop)

needs_numpy = unittest.skipUnless(np is not None, "numpy is not installed: python3-numpy")
SHAPE = {"hidden": 128, "latent": 64, "intermediate": 32, "experts": 12, "top_k": 3, "layers": 2}
SMALL = ["model.source=synthetic", "model.seed=9", f"model.shape={json.dumps(SHAPE)}", "limits.lanes=3",
         "limits.max_tokens=16", "limits.max_call_tokens=200", "limits.arena_mb=4", "calls.first_deadline_ms=5000"]


def free_ports(count):
    """Ports of loopback that nobody has, below those that the system gives out: a daemon finds its own again."""
    held = []
    for port in random.sample(range(10_000, 30_000), 5_000):
        s = socket.socket()
        try:
            s.bind(("127.0.0.1", port))
            held.append(s)
        except OSError:
            s.close()
        if len(held) == count:
            break
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


class Daemon:
    """`moed serve` of one rank in a directory of its own."""

    def __init__(self, sets, rank=0, directory=None):
        self.directory = directory or tempfile.mkdtemp(prefix="moed-python-")
        self.socket = os.path.join(self.directory, "moed", f"{rank}.sock")
        self.log, self.process = os.path.join(self.directory, f"log{rank}"), None
        # A test that is stopped leaves nothing running.
        self.command = ["setpriv", "--pdeathsig", "KILL", MOED, "serve", "--rank", str(rank)]
        for s in [f"run_dir={self.directory}", "http.listen=", *sets]:
            self.command += ["--set", s]
        self.start()

    def start(self):
        self.seen = self.text().count(" info ready ")
        with open(self.log, "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)

    def text(self):
        if not os.path.exists(self.log):
            return ""
        with open(self.log, encoding="utf-8") as log:
            return log.read()

    def wait_ready(self):
        end = time.monotonic() + READY_S
        while self.text().count(" info ready ") == self.seen:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the daemon is not ready: " + self.text())
            time.sleep(0.005)
        return self

    def kill(self):
        self.process.kill()
        self.process.wait(10)

    def close(self):
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def lanes(self):
        """Names of the engines that are attached."""
        command = [MOECTL, "status", "--json", "--socket", self.socket]
        done = subprocess.run(command, capture_output=True, timeout=CHILD_S, check=True)
        return sorted(lane["name"] for lane in json.loads(done.stdout)["lanes"])

    def wait_lanes(self, names):
        """What lanes() says, at the latest 5 s after asked once it is `names`."""
        end = time.monotonic() + 5
        while (now := self.lanes()) != names and time.monotonic() < end:
            time.sleep(0.01)
        return now


def python(code, *arguments, **environment):
    """Runs code in a process of its own."""
    env = dict(os.environ, PYTHONPATH=CLIENT, PYTHONDONTWRITEBYTECODE="1", **environment)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S, env=env, check=False)


def rows(tokens, seed=1, info=None):
    """Random x (BF16 bits), ids (int32, some -1) and weights (float32) of a call."""
    shape = info._asdict() if info else SHAPE
    random_numbers = np.random.default_rng(seed)
    x = random_numbers.standard_normal((tokens, shape["latent"])) * 2.0 ** random_numbers.integers(-8, 8, (tokens, 1))
    ids = random_numbers.integers(-1, shape["experts"], (tokens, shape["top_k"]))
    weights = random_numbers.uniform(0.01, 1, (tokens, shape["top_k"]))
    return decode_loop.to_bf16(x), ids.astype(np.int32), weights.astype(np.float32)


def table(code, values, tokens):
    """A buffer [tokens, columns] of struct code `code`, without numpy."""
    return memoryview(array.array(code, values)).cast("B").cast(code, (tokens, len(values) // tokens))


def ones(tokens):
    """x of ones, ids 0 to K - 1 and weights 0.5."""
    return (table("H", [0x3F80] * tokens * SHAPE["latent"], tokens),
            table("i", [*range(SHAPE["top_k"])] * tokens, tokens), table("f", [0.5] * tokens * SHAPE["top_k"], tokens))


def attach(socket_path, **options):
    """moed.attach, patient: a lane is free a moment after its detach, and after it has left the daemon's list."""
    end = time.monotonic() + 5
    while True:
        try:
            return moed.attach(socket_path, **options)
        except moed.Error as error:
            if error.status != moed.Status.BUSY or time.monotonic() >= end:
                raise
            time.sleep(0.005)


class Calls(unittest.TestCase):
    """How the end of a call is looked at."""

    def fails(self, status, action, *arguments, **fields):
        """The Error of an action that has to fail with this status."""
        with self.assertRaises(moed.Error) as raised:
            action(*arguments, **fields)
        error = raised.exception
        self.assertEqual((error.status, error.name), (status, status.name.lower()), str(error))
        self.assertGreater(len(str(error)), 10)
        return error

    def same(self, got, want):
        """Equal bits, +0 and -0 being one number; names the first element that differs."""
        self.assertEqual((got.shape, got.dtype), (want.shape, np.uint16))
        wrong = np.argwhere((got != want) & ((got | want) & 0x7FFF != 0))
        self.assertEqual(len(wrong), 0, f"first at {wrong[:1].tolist()}")


class Case(Calls):
    """Tests on one daemon that they share."""
    sets = SMALL

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(cls.sets)
        cls.addClassCleanup(cls.daemon.close)
        cls.daemon.wait_ready()

    def setUp(self):
        self.assertEqual(self.daemon.wait_lanes([]), [])

    def attach(self, **options):
        lane = attach(self.daemon.socket, **options)
        self.addCleanup(lane.detach)
        return lane


class Worlds(Calls):
    """Tests that start a world of their own."""

    def world(self, ranks, *sets, missing=()):
        """Daemons of one world, by rank; ready unless some are missing. It has layers for the decode loop's 92."""
        directory = tempfile.mkdtemp(prefix="moed-python-")
        self.addCleanup(shutil.rmtree, directory, ignore_errors=True)
        peers = ", ".join(f'"127.0.0.1:{port}"' for port in free_ports(ranks))
        shape = f"model.shape={json.dumps(SHAPE | {'layers': 100})}"
        daemons = [Daemon([*SMALL, shape, f"control.peers=[{peers}]", *sets], rank, directory)
                   for rank in range(ranks) if rank not in missing]
        for daemon in daemons:
            self.addCleanup(daemon.close)
        for daemon in daemons if not missing else ():
            daemon.wait_ready()
        return daemons
