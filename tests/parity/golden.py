#!/usr/bin/python3
"""A real daemon's answers against the oracle's, element by element.

    golden.py --moed BIN --moectl BIN --data DIR     DIR: what make.py wrote (tests/golden, or a set of --make)
    golden.py --make SEED H/L/I/E/K --data DIR       runs make.py into DIR unless DIR already holds that set

The first form starts `moed serve` on DIR/checkpoint as a world of one, runs `moectl call` for each routed set of
DIR/manifest.json with and without the norm, prints the worst error of each and exits 1 beyond a limit. It shares no code
with the project; the limits are those of design.md section 6 (derived in tests/support/tolerance.h). Needs numpy.
"""
import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

ROW_NORM = 5e-3  # norm of a row's error over the norm of the row
ELEMENT_OF_RMS = 0.05  # largest error of an element over the row's RMS
READY_S, CALL_S, STOP_S = 120, 120, 30  # deadlines, wide enough for a sanitizer build
DTYPES = {"bf16": np.uint16, "u8": np.uint8, "i32": np.int32, "f32": np.float32}
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


class Daemon:
    """`moed serve` as a world of one on DIR/checkpoint, in a directory of its own."""

    def __init__(self, moed, moectl, checkpoint):
        self.moectl = moectl
        self.dir = tempfile.mkdtemp(prefix="moed-")
        self.socket = os.path.join(self.dir, "golden", "0.sock")
        config = os.path.join(self.dir, "moed.yaml")
        with open(config, "w", encoding="utf-8") as f:
            f.write(f'group: golden\nrun_dir: "{self.dir}"\n')
        settings = ["model.source=huggingface", f"model.path={checkpoint}", "http.listen=", "canary.period_ms=0"]
        command = [moed, "serve", "--config", config] + [part for s in settings for part in ("--set", s)]
        self.log = open(os.path.join(self.dir, "log"), "w+", encoding="utf-8")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def tail(self):
        self.log.flush()
        with open(self.log.name, encoding="utf-8", errors="replace") as f:
            return "".join(f.readlines()[-30:])

    def wait_ready(self):
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise Failure(f"moed serve ended with {self.process.returncode} before it was ready:\n{self.tail()}")
            status = subprocess.run([self.moectl, "status", "--json", "--socket", self.socket], capture_output=True,
                                    text=True, timeout=CALL_S, check=False)
            if status.stdout.startswith("{") and json.loads(status.stdout).get("ready") is True:
                return
            time.sleep(0.05)
        raise Failure(f"moed serve was not ready within {READY_S} s:\n{self.tail()}")

    def call(self, data, layer, norm):
        out = os.path.join(self.dir, f"out{layer}.bin")
        if os.path.exists(out):
            os.unlink(out)
        base = f"routed{layer}_"
        command = [self.moectl, "call", "--socket", self.socket, "--layer", str(layer), "--x", data.path(base + "x"),
                   "--ids", data.path(base + "ids"), "--weights", data.path(base + "weights"), "--out", out]
        done = subprocess.run(command + ([] if norm else ["--no-norm"]), capture_output=True, text=True, timeout=CALL_S,
                              check=False)
        if done.returncode != 0:
            raise Failure(f"moectl call of layer {layer} exits {done.returncode}: {done.stdout}{done.stderr}\n{self.tail()}")
        shape = data.manifest[base + "x"]["shape"]
        got = np.fromfile(out, np.uint16)
        if got.size != shape[0] * shape[1]:
            raise Failure(f"moectl call of layer {layer} wrote {got.size} elements, expected {shape[0]} x {shape[1]}")
        return got.reshape(shape)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"moed serve did not end within {STOP_S} s of SIGTERM:\n{self.tail()}") from None
        if code != 0:
            raise Failure(f"moed serve ended with {code} after SIGTERM:\n{self.tail()}")

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_S)
        self.log.close()
        shutil.rmtree(self.dir, ignore_errors=True)


def run(moed, moectl, directory):
    data = Data(directory)
    daemon = Daemon(moed, moectl, os.path.join(os.path.abspath(directory), "checkpoint"))
    try:
        daemon.wait_ready()
        failed = 0
        for layer in data.routed_layers():
            for name, norm in ((f"routed{layer}_out_n1", True), (f"routed{layer}_latent_n1", False)):
                row, element, faults = compare(daemon.call(data, layer, norm), data.array(name))
                print(f"{name:20} worst row {row:.2e} of {ROW_NORM:.0e}, worst element {element:.2%} of {ELEMENT_OF_RMS:.0%}"
                      f"  {'ok' if not faults else 'FAILED'}")
                for fault in faults[:10]:
                    print(f"  {fault}")
                failed += bool(faults)
        daemon.stop()
    finally:
        daemon.close()
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
    p.add_argument("--make", nargs=2, metavar=("SEED", "H/L/I/E/K"))
    a = p.parse_args()
    try:
        if a.make:
            return make(a.make[0], a.make[1], a.data)
        if not a.moed or not a.moectl:
            p.error("--moed and --moectl are needed to compare")
        self_check()
        return run(a.moed, a.moectl, a.data)
    except (Failure, subprocess.SubprocessError) as failure:
        print(f"golden.py: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
