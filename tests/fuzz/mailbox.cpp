// Calls as an engine may write them: any record in the mailbox and any bytes in the arena, against a service loop and
// the CPU back end of a world of one rank. Every call ends in one reply that says what the record's check says, nothing
// outside `out` changes, and the good call that follows is right.
#include <memory>
#include <thread>

#include "daemon/abi/arena.h"
#include "daemon/abi/validate.h"
#include "daemon/metrics.h"
#include "daemon/service_loop.h"
#include "kernels/backend.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace moed;
using namespace moed::fuzz;

constexpr uint32_t kMostTokens = 16;
constexpr uint64_t kArenaBytes = 16384;
constexpr Nanos kLongest = 20'000'000'000;

Shape small_shape() {
  Shape s;
  s.hidden = s.latent = 64;
  s.intermediate = 32;
  s.experts = 4;
  s.top_k = 2;
  s.first_layer = 1;
  s.layers = 2;
  return s;
}

BackendOptions backend_options() {
  BackendOptions o;
  o.shape = small_shape();
  o.lanes = 1;
  o.max_tokens = 4;  // so that larger calls are served in pieces
  o.max_call_tokens = kMostTokens;
  o.in_process = true;
  return o;
}

ServiceOptions service_options() {
  ServiceOptions o;
  o.shape = small_shape();
  o.lanes = 1;
  return o;
}

/// One rank with one lane that an engine has attached to. Expert weights play no part here: layers are the identity.
class Rank {
 public:
  Rank()
      : backend_(make_cpu_backend(backend_options())), metrics_({}), service_(*backend_, metrics_, service_options()) {
    LaneMemory memory;
    require(backend_->open_lane(1, ArenaKind::host, kArenaBytes, memory) == Status::ok, "a lane opens");
    arena_ = Mapping(memory.arena, kArenaBytes);
    box_ = Mapping(memory.host_mailbox, sizeof(HostMailbox));
    service_.attach(1, Mapping(memory.host_mailbox, sizeof(HostMailbox)));
  }
  ~Rank() { service_.stop(); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  uint8_t* arena() const { return reinterpret_cast<uint8_t*>(arena_.data()); }

  /// Rings `bell` for `call`; where `then` is given it replaces the record right behind the bell, as no engine should.
  Reply call(const Call& call, uint64_t bell, const Call* then = nullptr) const {
    HostMailbox& box = *reinterpret_cast<HostMailbox*>(box_.data());
    std::memcpy(&box.call, &call, sizeof call);
    box.bell.store(bell);
    if (then != nullptr) std::memcpy(&box.call, then, sizeof *then);
    if (box.bell_asleep.load() != 0) futex_wake(futex_address(box.bell));
    for (const Nanos until = now_ns() + kLongest; box.done.load(std::memory_order_acquire) != bell;) {
      require(now_ns() < until, "a call ends");
      std::this_thread::yield();
    }
    Reply reply{};
    std::memcpy(&reply, &box.reply, sizeof reply);
    return reply;
  }

 private:
  std::unique_ptr<Backend> backend_;
  Metrics metrics_;
  ServiceLoop service_;
  Mapping arena_, box_;
};

constexpr uint64_t kX = 256, kScales = 3072, kIds = 4096, kWeights = 5120, kOut = 6144, kValid = 9216;

/// Two tokens of ones, each with two experts of weight 1/2: out is ones. 0x3F80 is 1.0 in BF16.
void check_good_call(const Rank& rank, uint64_t bell) {
  Call c{};
  c.layer = kIdentityLayer;
  c.tokens = 2;
  c.x = kX, c.ids = kIds, c.weights = kWeights, c.out = kOut;
  c.flags = kFlagNoNorm;
  const std::vector<uint16_t> ones(2 * 64, 0x3F80);
  const int32_t ids[] = {0, 3, 1, 2};
  const float weights[] = {0.5F, 0.5F, 0.5F, 0.5F};
  std::memcpy(rank.arena() + kX, ones.data(), ones.size() * 2);
  std::memcpy(rank.arena() + kIds, ids, sizeof ids);
  std::memcpy(rank.arena() + kWeights, weights, sizeof weights);
  const Reply reply = rank.call(c, bell);
  require(reply.number == bell && reply.status == 0, "a good call after any other is ok", std::to_string(reply.status));
  require(std::memcmp(rank.arena() + kOut, ones.data(), ones.size() * 2) == 0, "and its result is right");
}

/// A good record and what the input changes in it.
Call read_call(Input& in) {
  const auto how = in.take<uint8_t>();
  Call c{};
  c.layer = (how & 1) != 0 ? 1 : kIdentityLayer;
  c.tokens = in.take<uint8_t>() % (kMostTokens + 1);
  c.flags = in.take<uint8_t>() % 32U;
  c.x = kX, c.scales = kScales, c.ids = kIds, c.weights = kWeights, c.out = kOut;
  c.valid = (how & 2) != 0 ? kValid : 0;
  c.timeout_us = (how & 4) != 0 ? in.take<uint8_t>() : 0;
  if ((how & 8) != 0) in.patch(&c, sizeof c, 1 + in.take<uint8_t>() % 4U);
  if ((how & 16) != 0) in.fill(&c, sizeof c);
  return c;
}

/// What the reply has to say of a record that was not changed while it was read.
void check_reply(const Call& c, const Reply& reply) {
  const Refusal refusal = validate(c, {small_shape(), kMostTokens, kArenaBytes, false});
  const auto status = static_cast<Status>(reply.status);
  require(reply.layer == c.layer, "the reply names the layer");
  if (refusal.status != Status::ok) {
    require(status == refusal.status && reply.field == static_cast<uint32_t>(refusal.field) &&
                reply.value == refusal.value && reply.limit == refusal.limit,
            "the reply names what the record's check names", name(status));
    return;
  }
  const bool masks = (c.flags & kFlagMask) != 0;
  require(status == Status::ok || status == (masks ? Status::masked : Status::bad_route) ||
              (status == Status::peer_timeout && c.timeout_us != 0),
          "a sound record ends ok, or by its ids, or by its own deadline", name(status));
  if (status == Status::bad_route || status == Status::masked)
    require(reply.token < c.tokens && reply.slot < 2 && (reply.value < -1 || reply.value > 3) && reply.limit == 3,
            "the reply names a bad id", std::to_string(reply.value));
}

/// Nothing but out has changed; where the call failed, out is zeros.
void check_arena(const Call& c, const Reply& reply, const std::vector<uint8_t>& before, const uint8_t* after) {
  const bool known = c.kind <= 1 && c.tokens <= kMostTokens && fits(c.out, out_bytes(c, small_shape()), kArenaBytes);
  const size_t begin = known ? c.out : 0;
  const size_t end = known ? begin + out_bytes(c, small_shape()) : 0;
  require(std::memcmp(before.data(), after, begin) == 0 &&
              std::memcmp(before.data() + end, after + end, kArenaBytes - end) == 0,
          "no byte outside out changes", std::to_string(c.out));
  if (reply.status < static_cast<uint32_t>(Status::bad_call)) {
    int32_t valid = static_cast<int32_t>(c.tokens);
    if (c.valid != 0) std::memcpy(&valid, before.data() + c.valid, sizeof valid);
    const size_t rows = static_cast<size_t>(std::clamp<int64_t>(valid, 0, c.tokens));
    const size_t padding = c.tokens == 0 ? end : begin + rows * ((end - begin) / c.tokens);
    require(std::all_of(after + padding, after + end, [](uint8_t byte) { return byte == 0; }), "padding is zeros");
    return;
  }
  require(std::all_of(after + begin, after + end, [](uint8_t byte) { return byte == 0; }),
          "a failed call's out is zeros");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Rank rank;
  static uint64_t number = 0;
  Input in(data, size);
  const auto how = in.take<uint8_t>();
  const Call call = read_call(in);
  const Call other = (how & 1) != 0 ? read_call(in) : call;
  // Calls are numbered from 1; a bell of any other number is one call all the same.
  number += (how & 2) != 0 ? in.take<uint32_t>() + 1ULL : 1;

  std::vector<uint8_t> before(kArenaBytes);
  std::fill(before.begin() + kOut, before.begin() + kValid, uint8_t{0xA5});  // zeros in out are the daemon's
  in.fill(before.data() + kX, 64);                                           // the rest of x stays 0
  in.fill(before.data() + kIds, 128);
  in.fill(before.data() + kWeights, 128);
  in.fill(before.data() + kValid, 4);
  if ((how & 4) != 0) in.fill(before.data(), kArenaBytes);
  std::memcpy(rank.arena(), before.data(), kArenaBytes);
  const Reply reply = rank.call(call, number, (how & 1) != 0 ? &other : nullptr);
  require(reply.number == number && reply.status < kStatuses, "a reply to this call", std::to_string(reply.number));
  if ((how & 1) == 0) {
    check_reply(call, reply);
    check_arena(call, reply, before, rank.arena());
  }
  check_good_call(rank, ++number);
  return 0;
}
