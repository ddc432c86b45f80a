#!/usr/bin/python3
"""Real daemons' answers against the oracle's, element by element.

    golden.py --moed BIN --moectl BIN --data DIR [--ranks N]   DIR: what make.py wrote (tests/golden, or a set of --make)
    golden.py --make SEED H/L/I/E/K --data DIR                 runs make.py into DIR unless DIR already holds that set

The first form starts `moed serve` on DIR/checkpoint as a world of N daemons (without --ranks: one world after another, for
every N that DIR/manifest.json has arrays of), runs `moectl call` from every rank for each routed set with and without the
norm, prints the worst error of each and exits 1 beyond a limit, when two ranks get different bits, or when a daemon does
not leave with 0. It shares no code with the project; the limits are those of design.md section 6 (derived in
tests/support/tolerance.h). Needs numpy.
"""
import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

ROW_NORM = 5e-3  # norm of a row's error over the norm of the row
ELEMENT_OF_RMS = 0.05  # largest error of an element over the row's RMS
READY_S, CALL_S, STOP_S = 120, 120, 30  # deadlines, wide enough for a sanitizer build
DTYPES = {"bf16": np.uint16, "u8": np.uint8, "i32": np.int32, "f32": np.float32}
FIRST_PORT, LAST_PORT = 10_000, 29_999  # below those that the system gives out by itself
MAKE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "make.py")


class Failure(Exception):
    """What went wrong, in one sentence."""


class Data:
    """The arrays of one directory, as manifest.json describes them."""

    def __init__(self, directory):
        self.directory = directory
        with open(os.path.join(directory, "manifest.json"), encoding="utf-8") as f:
            self.manifest = json.load(f)

    def path(self, name):
        return os.path.join(self.directory, self.manifest[name]["file"])

    def array(self, name):
        entry = self.manifest[name]
        return np.fromfile(self.path(name), DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def routed_layers(self):
        found = (re.fullmatch(r"routed(\d+)_x", name) for name in self.manifest)
        layers = sorted(int(m.group(1)) for m in found if m)
        if not layers:
            raise Failure(f"{self.directory}/manifest.json names no routed set")
        return layers

    def worlds(self):
        """The numbers of ranks that every routed set has results for."""
        found = (re.fullmatch(r"routed(\d+)_(?:out|latent)_n(\d+)", name) for name in self.manifest)
        arrays = [(int(m.group(1)), int(m.group(2))) for m in found if m]
        worlds = sorted({ranks for _, ranks in arrays})
        for layer in self.routed_layers():
            for ranks in worlds:
                if arrays.count((layer, ranks)) != 2:
                    raise Failure(f"{self.directory}/manifest.json lacks routed{layer}_out_n{ranks} or its latent")
        if not worlds:
            raise Failure(f"{self.directory}/manifest.json has results of no world")
        return worlds


def bf16_value(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def compare(got_bits, want_bits):
    """BF16 bits [T, L] each -> (worst row error, worst element error, list of faults)."""
    got, want = bf16_value(got_bits), bf16_value(want_bits)
    faults, worst_row, worst_element = [], 0.0, 0.0
    for t in range(len(want)):
        if not want[t].any():
            if got_bits[t].any():
                faults.append(f"row {t} is not +0 bit for bit")
            continue
        if not np.isfinite(got[t]).all():
            faults.append(f"row {t} is not finite")
            continue
        error = np.abs(got[t] - want[t])
        row = np.linalg.norm(error) / np.linalg.norm(want[t])
        elements = error / np.sqrt((want[t] ** 2).mean())
        i = int(elements.argmax())
        worst_row, worst_element = max(worst_row, row), max(worst_element, elements[i])
        if row > ROW_NORM:
            faults.append(f"row {t}: error in norm {row:.2e}, limit {ROW_NORM:.0e}")
        if elements[i] > ELEMENT_OF_RMS:
            faults.append(f"row {t} column {i}: got {got[t, i]:.6g}, want {want[t, i]:.6g}, "
                          f"{elements[i]:.1%} of the row's RMS, limit {ELEMENT_OF_RMS:.0%}")
    return worst_row, worst_element, faults


def free_ports(count):
    """Ports that nobody has; all are held until the last is found, so that they differ."""
    held = []
    try:
        for _ in range(20_000):
            if len(held) == count:
                return [s.getsockname()[1] for s in held]
            s = socket.socket()
            try:
                s.bind(("127.0.0.1", random.randint(FIRST_PORT, LAST_PORT)))
                held.append(s)
            except OSError:
                s.close()
        raise Failure("no free ports")
    finally:
        for s in held:
            s.close()


class Daemon:
    """One rank: `moed serve` in the world's directory, with a log of its own."""

    def __init__(self, tools, directory, rank, settings):
        self.moectl, self.dir, self.rank = tools.moectl, directory, rank
        self.socket = os.path.join(directory, "golden", f"{rank}.sock")
        command = [tools.moed, "serve", "--config", os.path.join(directory, "moed.yaml"), "--rank", str(rank)]
        command += [part for s in settings for part in ("--set", s)]
        self.log = open(os.path.join(directory, f"log{rank}"), "w+", encoding="utf-8")
        # A script that is stopped leaves nothing running.
        self.process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL"] + command, stdout=self.log,
                                        stderr=subprocess.STDOUT)

    def tail(self):
        self.log.flush()
        with open(self.log.name, encoding="utf-8", errors="replace") as f:
            return f"log of rank {self.rank}:\n" + "".join(f.readlines()[-30:])

    def status(self):
        """What the daemon says of itself; empty while it does not answer."""
        done = subprocess.run([self.moectl, "status", "--json", "--socket", self.socket], capture_output=True, text=True,
                              timeout=CALL_S, check=False)
        return json.loads(done.stdout) if done.stdout.startswith("{") else {}

    def wait_ready(self, ranks, end):
        """A world of another size answers within the limits, too: the numbers are checked."""
        status = {}
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise Failure(f"rank {self.rank} ended with {self.process.returncode} before it was ready; {self.tail()}")
            status = self.status()
            if status.get("ready") is True:
                break
            time.sleep(0.05)
        else:
            missing = status.get("missing")
            raise Failure(f"rank {self.rank} was not ready within {READY_S} s, missing {missing}; {self.tail()}")
        if (status["rank"], status["ranks"]) != (self.rank, ranks):
            raise Failure(f"rank {self.rank} of {ranks} says that it is rank {status['rank']} of {status['ranks']}")

    def call(self, data, layer, norm):
        out = os.path.join(self.dir, "out.bin")
        if os.path.exists(out):
            os.unlink(out)
        base = f"routed{layer}_"
        command = [self.moectl, "call", "--socket", self.socket, "--layer", str(layer), "--x", data.path(base + "x"),
                   "--ids", data.path(base + "ids"), "--weights", data.path(base + "weights"), "--out", out]
        done = subprocess.run(command + ([] if norm else ["--no-norm"]), capture_output=True, text=True, timeout=CALL_S,
                              check=False)
        what = f"moectl call of layer {layer} from rank {self.rank}"
        if done.returncode != 0:
            raise Failure(f"{what} exits {done.returncode}: {done.stdout}{done.stderr}; {self.tail()}")
        shape = data.manifest[base + "x"]["shape"]
        got = np.fromfile(out, np.uint16)
        if got.size != shape[0] * shape[1]:
            raise Failure(f"{what} wrote {got.size} elements, expected {shape[0]} x {shape[1]}")
        return got.reshape(shape)

    def wait_left(self, end):
        try:
            code = self.process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise Failure(f"rank {self.rank} did not end within {STOP_S} s of SIGTERM; {self.tail()}") from None
        if code != 0:
            raise Failure(f"rank {self.rank} ended with {code} after SIGTERM; {self.tail()}")

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_S)
        self.log.close()


class World:
    """Daemons of all ranks on DIR/checkpoint, in one run directory, on ports of their own."""

    def __init__(self, tools, checkpoint, ranks):
        self.daemons = []
        self.dir = tempfile.mkdtemp(prefix="moed-")
        try:
            with open(os.path.join(self.dir, "moed.yaml"), "w", encoding="utf-8") as f:
                f.write(f'group: golden\nrun_dir: "{self.dir}"\n')
            peers = ",".join(f'"127.0.0.1:{port}"' for port in free_ports(ranks))
            settings = ["model.source=huggingface", f"model.path={checkpoint}", "http.listen=", "canary.period_ms=0",
                        f"control.peers=[{peers}]"]
            if ranks > 1:  # more loops than cores; and a machine that is busy elsewhere loses no rank
                settings += ["service.spin_us=0", "heartbeat.interval_ms=1000", "heartbeat.lost_after_ms=10000"]
            for rank in range(ranks):
                self.daemons.append(Daemon(tools, self.dir, rank, settings))
            end = time.monotonic() + READY_S
            for daemon in self.daemons:
                daemon.wait_ready(ranks, end)
        except BaseException:
            self.close()
            raise

    def stop(self):
        for daemon in self.daemons:
            daemon.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOP_S
        for daemon in self.daemons:
            daemon.wait_left(end)

    def close(self):
        for daemon in self.daemons:
            daemon.close()
        shutil.rmtree(self.dir, ignore_errors=True)


def compare_array(world, data, layer, norm):
    """One array of the manifest, asked from every rank; prints a line; true when all is well."""
    name = f"routed{layer}_{'out' if norm else 'latent'}_n{len(world.daemons)}"
    want, first = data.array(name), None
    worst_row, worst_element, faults = 0.0, 0.0, []
    for daemon in world.daemons:
        got = daemon.call(data, layer, norm)
        row, element, found = compare(got, want)
        worst_row, worst_element = max(worst_row, row), max(worst_element, element)
        first = got if first is None else first
        if not np.array_equal(got, first):
            found.append("other bits than from rank 0")
        faults += [f"from rank {daemon.rank}: {fault}" for fault in found]
    print(f"{name:20} worst row {worst_row:.2e} of {ROW_NORM:.0e}, worst element {worst_element:.2%} of {ELEMENT_OF_RMS:.0%}"
          f"  {'ok' if not faults else 'FAILED'}")
    for fault in faults[:10]:
        print(f"  {fault}")
    return not faults


def run(tools, directory, ranks):
    data = Data(directory)
    worlds = data.worlds()
    if ranks is not None and ranks not in worlds:
        raise Failure(f"--ranks {ranks}: {directory}/manifest.json has results of {worlds}")
    failed = 0
    for n in worlds if ranks is None else [ranks]:
        world = World(tools, os.path.join(os.path.abspath(directory), "checkpoint"), n)
        try:
            for layer in data.routed_layers():
                for norm in (True, False):
                    failed += not compare_array(world, data, layer, norm)
            world.stop()
        finally:
            world.close()
    return 1 if failed else 0


def make(seed, shape, directory):
    """Runs make.py into a directory beside DIR and renames it as a whole, so that a half-made set is never taken."""
    sizes = shape.split("/")
    if len(sizes) != 5:
        raise Failure(f"shape {shape}: expected hidden/latent/inter/experts/topk, for example 512/256/128/32/4")
    arguments = ["--seed", seed] + [p for n, v in zip(("hidden", "latent", "inter", "experts", "topk"), sizes)
                                    for p in ("--" + n, v)]
    with open(MAKE, "rb") as f:
        stamp = hashlib.sha256(f.read()).hexdigest() + " " + " ".join(arguments)
    stamp_path = os.path.join(directory, "made")
    if os.path.exists(stamp_path):
        with open(stamp_path, encoding="utf-8") as f:
            if f.read() == stamp:
                print(f"{directory} is up to date")
                return 0
    parent = os.path.dirname(os.path.abspath(directory))
    os.makedirs(parent, exist_ok=True)
    fresh = tempfile.mkdtemp(prefix=".make-", dir=parent)
    try:
        subprocess.run([sys.executable, MAKE, fresh] + arguments, check=True, timeout=900)
        with open(os.path.join(fresh, "made"), "w", encoding="utf-8") as f:
            f.write(stamp)
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(fresh, directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return 0


def self_check():
    """The comparison must fail on wrong rows; otherwise nothing else here means anything."""
    good = (np.arange(1, 257, dtype=np.uint16) + 0x3F00).reshape(2, 128)
    flipped, shifted, zero = good.copy(), np.roll(good, 3, axis=1), good.copy()
    flipped[1, 5] ^= 0x8000
    zero[0] = 0
    negative = zero.copy()
    negative[0, 7] = 0x8000
    if compare(good, good)[2] or compare(zero, zero)[2]:
        raise Failure("the comparison refuses equal rows")
    if not (compare(flipped, good)[2] and compare(shifted, good)[2] and compare(negative, zero)[2]):
        raise Failure("the comparison accepts wrong rows")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--moed")
    p.add_argument("--moectl")
    p.add_argument("--data", required=True)
    p.add_argument("--ranks", type=int)
    p.add_argument("--make", nargs=2, metavar=("SEED", "H/L/I/E/K"))
    a = p.parse_args()
    try:
        if a.make:
            return make(a.make[0], a.make[1], a.data)
        if not a.moed or not a.moectl:
            p.error("--moed and --moectl are needed to compare")
        self_check()
        return run(a, a.data, a.ranks)
    except (Failure, subprocess.SubprocessError) as failure:
        print(f"golden.py: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
