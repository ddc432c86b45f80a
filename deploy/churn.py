#!/usr/bin/python3
"""Engines come and go at a running world of daemons, and nothing of the daemons grows. deploy/demo --churn runs it.

    churn.py --run-dir DIR --moectl FILE --seconds S --samples FILE PID:PORT...     (process and HTTP port of each rank)

Every VISIT_EACH_S each rank has a visitor, one kind after another: one that calls and leaves, one that is killed in the
middle of a call, one that opens a connection and goes, one that is refused, one that only asks. Every second all pages
of every daemon are read. A steady engine calls rank 0 all the time. After WARM_UP_S and at the end the visitors are
gone and each daemon is looked at: descriptors, threads, mappings and shared memory have to be the same, anonymous
memory may have grown by ALLOWED_KIB and ALLOWED_BYTES a visit. --samples gets what each daemon had every SAMPLE_S. The environment:
MOED_LIBRARY, as for moed.py.
"""
import argparse
import collections
import ctypes
import http.client
import json
import multiprocessing
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "daemon" / "client"), str(ROOT / "deploy" / "examples")]
import decode_loop  # noqa: E402
import moed  # noqa: E402

WARM_UP_S, SAMPLE_S, PAGES_EACH_S, VISIT_EACH_S = 30, 2, 1, 0.1
SETTLE_S, VISIT_S, ANSWER_S = 60, 200, 60  # deadlines
SAME_S = 2  # how long the counts stand still before they count as settled
# Measured: a sound daemon touched up to 8 KiB for the first time in the 90 s after the warm-up (450 to 720 visits), up
# to 16 KiB when it had had half the visits before; one that left 256 bytes with each lane grew by 56 to 60 KiB.
# In an hour of 35,500 visits a sound daemon grew by 4 to 36 KiB, 24 of them in its second half minute. The least that
# malloc gives is 32 bytes, so a leak of one kind of visit in five is more than 6 bytes a visit.
ALLOWED_KIB, ALLOWED_BYTES = 32, 2
IDENTITY = moed.LAYER_IDENTITY
TOKENS, LONG = 5, 1024  # of a checked call, and of one that lasts long enough to be killed in

Held = collections.namedtuple("Held", "descriptors threads mappings shared_kib anonymous_kib resident_kib")
EXACT = Held._fields[:4]  # have to be the same
Settled = collections.namedtuple("Settled", "held visits mapped")  # lists by rank


def mapped(pid):
    """A process's mappings: (permissions, KiB, name) of each, with how many there are alike."""
    all_of_them = collections.Counter()
    for line in pathlib.Path("/proc", pid, "maps").read_text(encoding="utf-8").splitlines():
        span, permissions, _, _, _, *name = line.split(maxsplit=5)
        begin, end = (int(end, 16) for end in span.split("-"))
        all_of_them[permissions, (end - begin) // 1024, *name] += 1
    return all_of_them


def held(pid):
    """What a process holds now. Anonymous memory is counted page by page: the counters in `status` are kept for each
    CPU and lag."""
    proc = pathlib.Path("/proc", pid)
    maps = mapped(pid)
    shared = sum(kib * count for (permissions, kib, *_), count in maps.items() if permissions[3] == "s")
    rollup = proc.joinpath("smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    kib = {line.split()[0]: int(line.split()[1]) for line in rollup}
    return Held(len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")), maps.total(), shared,
                kib["Anonymous:"], kib["Rss:"])


class Question:
    """A call's inputs, and what it has to answer by layer: the identity layer's from its definition, the other layers'
    from two calls at rank 0. A row has the same bits at whatever rank and beside whatever else it is asked."""

    def __init__(self, path):
        random_numbers = np.random.default_rng(1)
        with attach(path, "first") as lane:
            info = lane.info
            self.x = decode_loop.to_bf16(random_numbers.standard_normal((TOKENS, info.latent), np.float32))
            self.ids = random_numbers.integers(0, info.experts, (TOKENS, info.top_k)).astype(np.int32)
            self.weights = random_numbers.uniform(0.01, 1, (TOKENS, info.top_k)).astype(np.float32)
            identity = decode_loop.identity_answer(self.x, self.ids, self.weights, info.experts, info.ranks)
            self.want = {IDENTITY: identity}
            for layer in range(info.first_layer, info.first_layer + info.layers):
                self.want[layer] = self.answer(lane, layer)
            for layer in self.want:
                self.ask(lane, layer)

    def answer(self, lane, layer):
        slot = lane.slot()
        slot.x[:TOKENS], slot.ids[:TOKENS], slot.weights[:TOKENS] = self.x, self.ids, self.weights
        slot.out[:TOKENS] = 0xFFFF  # so that an element that nobody wrote shows
        reply = lane.call(layer=layer, tokens=TOKENS, flags=moed.FLAG_NO_NORM if layer == IDENTITY else 0)
        if reply.status != moed.Status.OK:
            sys.exit(f"rank {lane.info.rank}: a call ended with status {reply.status}")
        return slot.out[:TOKENS].copy()

    def ask(self, lane, layer):
        """One call, whose answer is right or ends this process."""
        got, want = self.answer(lane, layer), self.want[layer]
        if ((got != want) & ((got | want) & 0x7FFF != 0)).any():  # +0 and -0 are one number
            sys.exit(f"rank {lane.info.rank}: a wrong answer in layer {layer}")


def attach(path, name, **options):
    """A lane. One that was left a moment ago is not free yet, and libmoed waits 5 s for a daemon on a busy machine."""
    end = time.monotonic() + ANSWER_S
    while True:
        try:
            return moed.attach(path, name=name, **options)
        except moed.Error as error:
            if error.status not in (moed.Status.BUSY, moed.Status.DAEMON_LOST) or time.monotonic() >= end:
                raise
            time.sleep(0.01)


def submit_long(lane):
    """Hands over a call that uses every rank and takes a while."""
    slot = lane.slot()
    slot.x[:LONG], slot.weights[:LONG] = 0x3F80, 0.5
    slot.ids[:LONG] = np.arange(LONG * lane.info.top_k).reshape(LONG, -1) % lane.info.experts
    lane.submit(layer=lane.info.first_layer, tokens=LONG)


# The visitors: each runs in a process of its own, with its rank's socket.


def polite(world, rank):
    with attach(world.path(rank), "polite") as lane:
        for layer in world.question.want:
            world.question.ask(lane, layer)


def killed(world, rank):
    lane = attach(world.path(rank), "killed")
    world.question.ask(lane, IDENTITY)
    rng, end = random.Random(os.getpid()), time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        submit_long(lane)
        time.sleep(rng.uniform(0, 0.004))
        if lane.poll() is None:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(f"no call of {LONG} tokens lasted long enough to be killed in")


def silent(world, rank):
    """Connections that say nothing, or only a part."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.connect(world.path(rank))
    with socket.create_connection(("127.0.0.1", world.ports[rank]), ANSWER_S) as s:
        s.sendall(b"GET /metrics HTTP/1.1\r\nHo")


def refused(world, rank):
    try:
        attach(world.path(rank), "refused", model_digest=bytes(32))
    except moed.Error as error:
        if error.status == moed.Status.VERSION:
            return
        raise
    sys.exit(f"rank {rank} takes an engine of another model")


def asking(world, rank):
    """Status over the socket, and the flight records, whose descriptor is handed over."""
    end = time.monotonic() + ANSWER_S
    for command in (("status", "--json"), ("trace", "--last", "4")):
        command = [world.moectl, *command, "--socket", world.path(rank)]
        while (done := subprocess.run(command, capture_output=True, timeout=ANSWER_S, check=False)).returncode != 0:
            if done.returncode != 3 or time.monotonic() >= end:  # 3: no answer within 5 s
                sys.exit(f"rank {rank}: {done.stderr.decode()}")


VISITORS = {polite: 0, killed: -signal.SIGKILL, silent: 0, refused: 0, asking: 0}  # and how each has to end


def steady(world, told):
    """Calls rank 0, again and again, until told to stop; tells how many calls it made."""
    calls = 0
    with attach(world.path(0), "steady") as lane:
        while not told.poll(0.001):
            for layer in world.question.want:
                world.question.ask(lane, layer)
                calls += 1
    told.send(calls)


def start(function, *arguments):
    """A process that ends with this one."""
    parent = os.getpid()

    def run():
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == parent:
            function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    return process


class World:
    """The daemons, who visits them, and what they held."""

    def __init__(self, options):
        self.moectl, self.run_dir, self.seconds = options.moectl, options.run_dir, options.seconds
        self.pids, ports = zip(*(rank.split(":") for rank in options.ranks))
        self.ports, self.ranks = [int(port) for port in ports], range(len(ports))
        self.visits, self.visiting = collections.Counter(), {}
        self.greatest = [Held(*[0] * len(Held._fields))] * len(ports)
        self.samples = open(options.samples, "w", encoding="utf-8", buffering=1)  # each line at once, until the end
        print("seconds", "phase", "rank", "visits", *Held._fields, sep=",", file=self.samples)
        self.question = Question(self.path(0))
        self.use_all_lanes()
        self.began = time.monotonic()

    def path(self, rank):
        return f"{self.run_dir}/demo/{rank}.sock"

    def page(self, rank, path, may=(200,)):
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[rank], timeout=ANSWER_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status not in may or not body:
            sys.exit(f"rank {rank}: {path} answers {answer.status} with {len(body)} bytes")
        return body

    def read_pages(self):
        """A busy machine may make a rank say that it is not ready for a moment."""
        for rank in self.ranks:
            for path, may in (("/metrics", (200,)), ("/status.json", (200,)), ("/readyz", (200, 503))):
                self.page(rank, path, may)

    def use_all_lanes(self):
        """A lane keeps memory for the longest call that it has had; so each has the longest one before it counts."""
        for rank in self.ranks:
            limit = json.loads(self.page(rank, "/status.json"))["limits"]["lanes"]
            lanes = [attach(self.path(rank), "first") for _ in range(limit)]
            for lane in lanes:
                submit_long(lane)
                if lane.wait() is None:
                    sys.exit(f"rank {rank}: a call does not end")
                lane.detach()

    def sample(self, phase):
        """Remembers what each daemon holds now."""
        at = time.monotonic() - self.began
        now = [held(pid) for pid in self.pids]
        for rank in self.ranks:
            print(f"{at:.1f}", phase, rank, self.visits[rank], *now[rank], sep=",", file=self.samples)
            self.greatest[rank] = Held(*map(max, self.greatest[rank], now[rank]))
        return now

    def take_leave(self, wait=False):
        """Looks at the visitors that have ended; with `wait` at all of them."""
        for rank, (kind, process, since) in list(self.visiting.items()):
            process.join(max(since + VISIT_S - time.monotonic(), 0) if wait else 0)
            if process.exitcode is None and time.monotonic() < since + VISIT_S:
                continue
            if process.exitcode != VISITORS[kind]:
                sys.exit(f"rank {rank}: a {kind.__name__} visitor ended with {process.exitcode}")
            process.close()
            del self.visiting[rank]
            self.visits[rank] += 1
            self.visits[rank, kind] += 1

    def churn(self, until, engine):
        """Visitors at every rank whose last one has left, until so many seconds after the start."""
        kinds, read, sampled = list(VISITORS), 0, 0
        while (now := time.monotonic()) < self.began + until:
            if not engine.is_alive():
                sys.exit("the steady engine ended")
            self.take_leave()
            for rank in self.ranks:
                if rank not in self.visiting:
                    kind = kinds[(self.visits[rank] + rank) % len(kinds)]
                    self.visiting[rank] = kind, start(kind, self, rank), now
            if now >= read + PAGES_EACH_S:
                self.read_pages()
                read = now
            if now >= sampled + SAMPLE_S:
                self.sample("churn")
                sampled = now
            time.sleep(max(now + VISIT_EACH_S - time.monotonic(), 0))

    def settled(self, phase, like=None):
        """What each daemon holds when nobody but the steady engine is there: once the counts have stood still, and
        are those of `like`; or whatever they are at the deadline."""
        self.take_leave(wait=True)
        end, since, last = time.monotonic() + SETTLE_S, 0, None
        wanted = like and [h[:len(EXACT)] for h in like.held]
        while time.monotonic() < end:
            now = [held(pid)[:len(EXACT)] for pid in self.pids]
            if now != last or (wanted and now != wanted):
                since, last = time.monotonic(), now
            elif time.monotonic() >= since + SAME_S:
                break
            time.sleep(0.1)
        return Settled(self.sample(phase), [self.visits[r] for r in self.ranks], [mapped(pid) for pid in self.pids])


def table(world, warm, end):
    """Prints what each daemon held, and returns what is wrong with it."""
    wrong = []
    print("rank          " + "".join(f"{name.replace('_kib', ' KiB'):>15}" for name in Held._fields) + "   visits")
    for rank in world.ranks:
        for name, row, visits in (("warm", warm.held[rank], warm.visits[rank]),
                                  ("end", end.held[rank], end.visits[rank]), ("greatest", world.greatest[rank], "")):
            print(f"{rank:4} {name:9}" + "".join(f"{value:15}" for value in row) + f"{visits:9}")
        for field in EXACT:
            before, after = getattr(warm.held[rank], field), getattr(end.held[rank], field)
            if before != after:
                wrong.append(f"rank {rank}: {field} went from {before} to {after}")
        if warm.held[rank].mappings != end.held[rank].mappings:
            wrong += [f"  {sign} {count} of {mapping}" for sign, more in (
                ("-", warm.mapped[rank] - end.mapped[rank]), ("+", end.mapped[rank] - warm.mapped[rank]))
                for mapping, count in more.items()]
        grown = end.held[rank].anonymous_kib - warm.held[rank].anonymous_kib
        allowed = ALLOWED_KIB + ALLOWED_BYTES * (end.visits[rank] - warm.visits[rank]) // 1024
        if grown > allowed:
            wrong.append(f"rank {rank}: anonymous memory has grown by {grown} KiB, more than {allowed}")
    return wrong


def run(options):
    world = World(options)
    told, ear = multiprocessing.Pipe()
    engine = start(steady, world, ear)
    world.churn(WARM_UP_S, engine)
    warm = world.settled("warm")
    world.churn(options.seconds, engine)
    end = world.settled("end", warm)
    told.send("stop")
    calls = told.recv() if told.poll(ANSWER_S) else 0
    wrong = table(world, warm, end)
    never = [f"rank {rank}: no {kind.__name__} visitor"
             for rank in world.ranks for kind in VISITORS if not world.visits[rank, kind]]
    if calls == 0:
        never.append("the steady engine made no call")
    said = ", ".join(f"{sum(world.visits[r, kind] for r in world.ranks)} {kind.__name__}" for kind in VISITORS)
    print(f"visitors: {said}; the steady engine made {calls} calls; every answer checked, all right")
    print(f"samples of every {SAMPLE_S} s: {options.samples}")
    if wrong or never:
        sys.exit("\n".join([*wrong, *never]))
    print(f"nothing grew: the same {', '.join(EXACT[:3])} and shared memory; anonymous memory within {ALLOWED_KIB} KiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--run-dir", "--moectl", "--samples"):
        parser.add_argument(name, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("ranks", nargs="+")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
