#!/usr/bin/python3
"""A decode loop as an engine author would write it: in every step each layer's routed experts are asked of moed.

    decode_loop.py [--socket S] [--steps N] [--tokens T] [--layers N] [--lanes 1|2] [--check] [--patience S]
      --socket S     the daemon's socket (else $MOED_SOCKET, else the only one under /run/moed)
      --steps N      decode steps (10)
      --tokens T     tokens of each step (8)
      --layers N     layers of each step (92): at most as many as the daemon serves
      --lanes N      calls in flight at once (1); with 2 the step's tokens are split over two lanes
      --check        ask for the identity layer in every layer and compare each element with numpy's answer
      --patience S   how long to wait for a daemon that is not there (30 seconds)

Prints tokens/s and how the calls ended. What an engine has to survive, this does: a daemon that is restarted (it takes
a lane of the new one and asks for the layer again), and a lost peer (it says who, leaves the experts of that layer out
and goes on). Exits 1 when an answer is wrong, a call is refused or the daemon does not come back. Needs numpy.
"""
import argparse
import collections
import os
import sys
import time

try:
    import numpy as np
except ImportError:
    sys.exit("decode_loop.py: needs numpy; on Debian it is python3-numpy, for /usr/bin/python3")

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "daemon", "client"))
import moed  # noqa: E402  from where it is installed, else from this source tree

BLOCK, LARGEST_E4M3 = 32, 448.0  # MXFP8: elements of one scale, largest magnitude of a code
RETRY_S = 0.1  # between two looks for a daemon


class Failure(Exception):
    """What ends the loop, in one sentence."""


def to_bf16(values):
    """float32 -> BF16 bits, to nearest even; finite numbers only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    """BF16 bits -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def through_mxfp8(values):
    """float32 [T, L] -> what MXFP8 leaves of them: E4M3 codes times a power of two, one (rounded up) for each 32."""
    blocks = values.astype(np.float64).reshape(len(values), values.shape[1] // BLOCK, BLOCK)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    significand, exponent = np.frexp(largest)
    scale = exponent - 9 + (significand > LARGEST_E4M3 / 512)
    scaled = np.ldexp(blocks, -scale)
    step = np.ldexp(1.0, np.maximum(np.frexp(scaled)[1] - 4, -9))  # 4 significant bits, down to steps of 2^-9
    codes = np.clip(np.rint(scaled / step) * step, -LARGEST_E4M3, LARGEST_E4M3)
    kept = np.where((largest == 0) | (scale <= -127), 0.0, np.ldexp(codes, scale))
    return kept.reshape(values.shape).astype(np.float32)


def identity_answer(x, ids, weights, experts, ranks):
    """The identity layer from its definition: x BF16 bits [T, L], ids and float32 weights [T, K] -> BF16 bits [T, L].

    Each rank adds x times the sum of its own experts' weights, rounded to BF16; the sum over ranks is rounded once."""
    sent, total = through_mxfp8(from_bf16(x)), np.zeros(x.shape, np.float32)
    for rank in range(ranks):
        local = (ids >= rank * experts // ranks) & (ids < (rank + 1) * experts // ranks)
        weight = np.zeros(len(x), np.float32)
        for slot in range(ids.shape[1]):
            weight += np.where(local[:, slot], weights[:, slot], np.float32(0))
        total += from_bf16(to_bf16(sent * weight[:, None]))
    return to_bf16(total)


def find_daemon(options, name, model_digest=None):
    """A lane; waits up to --patience seconds for a daemon (of this model) with a free one."""
    end = time.monotonic() + options.patience
    while True:
        try:
            return moed.attach(options.socket, name=name, model_digest=model_digest)
        except moed.Error as error:
            waiting = error.status in (moed.Status.DAEMON_LOST, moed.Status.BUSY, moed.Status.DRAINING)
            if not waiting or time.monotonic() >= end:
                raise Failure(f"no lane: {error.name}: {error}") from error
            time.sleep(RETRY_S)


class Batch:
    """Some of the step's tokens: their hidden states, which the engine owns, and the lane that serves them."""

    def __init__(self, options, number, tokens, seen):
        self.options, self.tokens, self.seen, self.name = options, tokens, seen, f"decode_loop-{number}"
        self.layer, self.inputs, self.in_flight, self.missing, self.right = None, None, False, frozenset(), 0
        self.random = np.random.default_rng(number)
        self.take(find_daemon(options, self.name))
        self.hidden = self.random.standard_normal((tokens, self.lane.info.latent), np.float32)

    def take(self, lane):
        """Uses this lane's slot 0 from now on."""
        if lane.info.slot_tokens < self.tokens:
            raise Failure(f"{self.tokens} tokens, but a slot holds {lane.info.slot_tokens}: use less --tokens")
        self.lane, slot = lane, lane.slot(0)
        self.x, self.ids, self.weights, self.out = (
            array[:self.tokens] for array in (slot.x, slot.ids, slot.weights, slot.out))

    def start(self, layer):
        """What comes before the experts: normalise, route, and hand both over."""
        self.layer = layer
        info, rms = self.lane.info, np.sqrt((self.hidden ** 2).mean(axis=1, keepdims=True) + 1e-6)
        # A router would choose here; neighbours from a random expert on are as good for a loop without a model.
        first = self.random.integers(0, info.experts, (self.tokens, 1), np.int32)
        ids = (first + np.arange(info.top_k, dtype=np.int32)) % info.experts
        weights = self.random.dirichlet(np.ones(info.top_k), self.tokens).astype(np.float32)
        self.inputs = to_bf16(self.hidden / rms), ids, weights
        self.write()
        self.attempt(self.submit)

    def write(self):
        """Puts the layer's inputs into the arena."""
        self.x[:], self.ids[:], self.weights[:] = self.inputs

    def finish(self):
        """Waits for the layer that was started, and adds what the experts say."""
        while self.layer is not None:
            if not self.in_flight:
                self.attempt(self.submit)
            elif (reply := self.attempt(self.lane.wait)) is not None:
                self.add(reply)
            elif self.in_flight:
                raise Failure(f"layer {self.layer} does not end: is the daemon stopped?")

    def submit(self):
        check = self.options.check
        self.lane.submit(layer=moed.LAYER_IDENTITY if check else self.layer, tokens=self.tokens,
                         flags=moed.FLAG_NO_NORM if check else 0)
        self.in_flight = True

    def attempt(self, action):
        """What the action returns; None after a failure that the loop survives."""
        try:
            return action()
        except moed.Error as error:
            self.in_flight = False
            self.seen[error.name] += 1
            self.survive(error)
            return None

    def add(self, reply):
        self.seen[moed.Status(reply.status).name.lower()] += 1
        if self.options.check and reply.status == moed.Status.OK:
            self.compare()
        if reply.status == moed.Status.OK and self.missing:
            print(f"{self.name}: layer {self.layer}: all ranks answer again", flush=True)
            self.missing = frozenset()
        self.hidden += from_bf16(self.out)
        self.layer, self.in_flight = None, False

    def survive(self, error):
        """Goes on after a failure: a lost daemon is asked again, a late or lost peer's layer is left out."""
        if error.status in (moed.Status.DAEMON_LOST, moed.Status.DRAINING):
            print(f"{self.name}: layer {self.layer}: {error.name}: {error}", flush=True)
            self.return_to_daemon()
        elif error.ranks:
            if error.ranks != self.missing:
                ranks = ", ".join(map(str, sorted(error.ranks)))
                print(f"{self.name}: layer {self.layer}: {error.name}: rank {ranks}", flush=True)
            self.missing, self.layer = error.ranks, None
        else:
            raise Failure(f"layer {self.layer}: {error.name}: {error}") from error

    def return_to_daemon(self):
        """A lane of the daemon's next life, with the layer's inputs; finish asks for it once more."""
        self.lane.detach()
        self.take(find_daemon(self.options, self.name, self.lane.info.model_digest))
        self.write()
        print(f"{self.name}: attached again as lane {self.lane.info.lane}", flush=True)

    def compare(self):
        """Raises for the first element that is not the identity layer's."""
        info = self.lane.info
        want = identity_answer(*self.inputs, info.experts, info.ranks)
        wrong = np.argwhere((self.out != want) & ((self.out | want) & 0x7FFF != 0))  # +0 and -0 are one number
        if len(wrong):
            t, i = wrong[0]
            raise Failure(f"layer {self.layer}: {len(wrong)} elements are wrong, the first is token {t} element {i}: "
                          f"0x{self.out[t, i]:04x}, right is 0x{want[t, i]:04x}")
        self.right += self.tokens


def decode(options, batches):
    """Yields after every step."""
    info = batches[0].lane.info
    layers = range(info.first_layer, info.first_layer + min(options.layers, info.layers))
    for _ in range(options.steps):
        for layer in layers:
            for batch in batches:  # while one batch is prepared here, the other's call is in flight
                batch.finish()
                batch.start(layer)
        for batch in batches:
            batch.finish()
        yield len(layers)


def run(options):
    """Runs all steps and prints the summary, also when it is interrupted."""
    seen, batches, steps, layers = collections.Counter(), [], 0, 0
    began = time.monotonic()
    try:
        for i in range(options.lanes):
            tokens = options.tokens * (i + 1) // options.lanes - options.tokens * i // options.lanes
            batches.append(Batch(options, i, tokens, seen))
        began = time.monotonic()
        for layers in decode(options, batches):
            steps += 1
    finally:
        speed = steps * options.tokens / max(time.monotonic() - began, 1e-9)
        print(f"steps {steps}  layers {layers}  tokens {options.tokens}  lanes {len(batches)}  {speed:.1f} tokens/s")
        print("calls: " + (", ".join(f"{count} {name}" for name, count in sorted(seen.items())) or "none"), flush=True)
        if options.check:
            print(f"{sum(batch.right for batch in batches)} rows are the identity layer's, bit for bit", flush=True)
        for batch in batches:
            batch.lane.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket")
    for name, default in (("--steps", 10), ("--tokens", 8), ("--layers", 92)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--lanes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--patience", type=float, default=30)
    options = parser.parse_args()
    if options.steps < 1 or options.layers < 1 or options.tokens < options.lanes:
        parser.error("--steps and --layers are at least 1, --tokens at least the number of lanes")
    try:
        run(options)
    except Failure as why:
        sys.exit(f"decode_loop.py: {why}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
