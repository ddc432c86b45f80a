// A world of N ranks in this process: each with a back end and a service loop of its own, over one mapping of every
// segment, so that a race detector sees both ends. Engines are threads that write mailboxes themselves.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/abi/arena.h"
#include "daemon/metrics.h"
#include "daemon/service_loop.h"
#include "kernels/backend.h"
#include "kernels/heap.h"
#include "kernels/numbers.h"
#include "tests/support/link.h"

namespace moed::test {

/// A call's inputs outside any arena: x BF16 [T, L], or with kFlagWire codes [T, L] and scales [T, L / 32]; ids and
/// weights [T, K], laid out as the flags say (kFlagIds64, kFlagWeights16: rounded to BF16).
struct Job {
  uint32_t layer = kIdentityLayer, flags = 0, timeout_us = 20'000'000;
  std::vector<uint16_t> x{};
  std::vector<int32_t> ids{};
  std::vector<float> weights{};
  std::vector<uint8_t> codes{}, scales{};
  std::optional<int32_t> valid{};  ///< nothing: no such array
};

/// One engine on one lane of one rank: what libmoed does, by hand.
class Engine {
 public:
  Engine(Backend& backend, ServiceLoop& service, const Shape& shape, uint32_t lane, uint64_t bytes)
      : backend_(backend), service_(service), shape_(shape), lane_(lane) {
    LaneMemory memory;
    if (backend.open_lane(static_cast<int>(lane), ArenaKind::host, bytes, memory) != Status::ok)
      throw std::runtime_error(backend.last_error());
    arena_ = Mapping(memory.arena, bytes);
    box_ = Mapping(memory.host_mailbox, sizeof(HostMailbox));
    service.attach(lane, Mapping(memory.host_mailbox, sizeof(HostMailbox)));
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() { leave(); }

  /// Lets the lane go and waits until nothing refers to it.
  void leave() {
    if (gone_) return;
    gone_ = true;
    std::atomic<bool> released{false};
    service_.detach(lane_, [&] { released = true; });
    for (const Nanos until = now_ns() + 10'000'000'000; !released;) {
      if (now_ns() > until) {  // from a destructor: there is no way on
        std::fprintf(stderr, "lane %u is not let go within 10 s\n", lane_);
        std::abort();
      }
      std::this_thread::yield();
    }
    backend_.close_lane(static_cast<int>(lane_));
  }

  std::byte* arena() const { return arena_.data(); }
  uint64_t arena_bytes() const { return arena_.bytes(); }

  void submit(const Call& call) {
    HostMailbox& box = *reinterpret_cast<HostMailbox*>(box_.data());
    box.call = call;
    box.bell.store(++number_);
    if (box.bell_asleep.load() != 0) futex_wake(futex_address(box.bell));
  }

  /// False: no answer within `limit`.
  bool wait(Reply& out, Nanos limit = 30'000'000'000) {
    HostMailbox& box = *reinterpret_cast<HostMailbox*>(box_.data());
    const Nanos until = now_ns() + limit;
    while (box.done.load(std::memory_order_acquire) != number_) {
      if (now_ns() > until) return false;
      std::this_thread::yield();
    }
    std::memcpy(&out, &box.reply, sizeof out);
    return true;
  }

  Reply call(const Call& call) {
    submit(call);
    Reply reply{};
    if (!wait(reply)) throw std::runtime_error("no answer");
    return reply;
  }

  /// Lays a job out in the arena, one array behind the other.
  Call lay_out(const Job& job) {
    const auto tokens = static_cast<uint32_t>(job.ids.size() / shape_.top_k);
    Call c{};
    c.layer = job.layer;
    c.tokens = tokens;
    c.flags = job.flags;
    c.timeout_us = job.timeout_us;
    uint64_t at = 256;
    const auto put = [&](const void* data, uint64_t bytes) {
      const uint64_t here = at;
      at = round_up(at + bytes, 256);
      if (at > arena_.bytes()) throw std::runtime_error("the arena is too small for this job");
      if (bytes != 0) std::memcpy(arena() + here, data, bytes);
      return here;
    };
    const auto put_all = [&](const auto& v) { return put(v.data(), v.size() * sizeof v[0]); };
    c.x = (job.flags & kFlagWire) != 0 ? put_all(job.codes) : put_all(job.x);
    if ((job.flags & kFlagWire) != 0) c.scales = put_all(job.scales);
    c.ids = (job.flags & kFlagIds64) != 0 ? put_all(std::vector<int64_t>(job.ids.begin(), job.ids.end()))
                                          : put_all(job.ids);
    std::vector<uint16_t> narrow;
    for (const float w : job.weights) narrow.push_back(float_to_bf16(w));
    c.weights = (job.flags & kFlagWeights16) != 0 ? put_all(narrow) : put_all(job.weights);
    if (job.valid) c.valid = put(&*job.valid, sizeof *job.valid);
    c.out = put_all(std::vector<uint16_t>(uint64_t{tokens} * shape_.latent, 0x7FFF));
    return c;
  }

  std::vector<uint16_t> out(const Call& c) const {
    std::vector<uint16_t> rows(uint64_t{c.tokens} * shape_.latent);
    if (!rows.empty()) std::memcpy(rows.data(), arena() + c.out, rows.size() * 2);
    return rows;
  }

  /// Lays out, calls, and gives the rows; the reply goes to `reply`.
  std::vector<uint16_t> run(const Job& job, Reply& reply) {
    const Call c = lay_out(job);
    reply = call(c);
    return out(c);
  }

 private:
  Backend& backend_;
  ServiceLoop& service_;
  Shape shape_;
  uint32_t lane_;
  Mapping arena_, box_;
  uint64_t number_ = 0;
  bool gone_ = false;
};

struct WorldOptions {
  Shape shape;
  uint32_t ranks = 1, lanes = 2, max_tokens = 128, max_call_tokens = 4096, linger_us = 3, max_pairs = 8192;
  uint32_t deadline_ms = 20'000;
  OnLostRank on_lost_rank = OnLostRank::fail;
  Drills drills{};
  bool linked = true;
  /// The weights of rank r of N; nothing: identity layers.
  std::function<ModelWeights(uint32_t rank)> weights{};
  std::function<std::unique_ptr<Backend>(BackendOptions)> make = make_cpu_backend;
  uint32_t spin_us = 0;                ///< of the service loops; 0: many ranks on few cores sleep at once
  uint32_t stuck_after_ms = 0;         ///< of a CUDA back end; 0: it never looks
  std::vector<std::string> devices{};  ///< GPUs, of which rank r takes number r modulo their count; nothing: no GPU
};

class World {
 public:
  explicit World(WorldOptions options) : options_(std::move(options)) {
    for (uint32_t r = 0; r < options_.ranks; ++r) nodes_.push_back(std::make_unique<Node>(options_, r));
    if (!options_.linked) return;
    for (uint32_t a = 0; a < options_.ranks; ++a)
      for (uint32_t b = 0; b < a; ++b) link(a, b, 1);
  }

  World(const World&) = delete;
  World& operator=(const World&) = delete;

  /// Links go before back ends, as when daemons leave: nobody writes to memory that is gone.
  ~World() {
    while (!links_.empty()) lose(links_.begin()->first, links_.begin()->second);
  }

  /// Makes segments and maps them on both sides.
  void map(uint32_t a, uint32_t b) {
    give_segment(backend(a), a, backend(b), b);
    give_segment(backend(b), b, backend(a), a);
    links_.insert(std::minmax(a, b));
  }

  /// Tells one end alone that its link to `peer` is ready. Calls of that end wait until the peer is told, too.
  void ready(uint32_t rank, uint32_t peer, uint32_t session) {
    backend(rank).link_changed(static_cast<int>(peer), LinkState::ready, session);
  }

  /// A whole link: mapped, and ready on both ends.
  void link(uint32_t a, uint32_t b, uint32_t session) {
    map(a, b);
    ready(a, b, session);
    ready(b, a, session);
  }

  /// Both ends lose the link and retire its segments.
  void lose(uint32_t a, uint32_t b) {
    links_.erase(std::minmax(a, b));
    backend(a).link_changed(static_cast<int>(b), LinkState::lost, 0);
    backend(b).link_changed(static_cast<int>(a), LinkState::lost, 0);
    backend(a).retire(static_cast<int>(b));
    backend(b).retire(static_cast<int>(a));
  }

  std::unique_ptr<Engine> engine(uint32_t rank, uint32_t lane = 1, uint64_t bytes = 8 << 20) {
    return std::make_unique<Engine>(backend(rank), nodes_[rank]->service, options_.shape, lane, bytes);
  }
  Backend& backend(uint32_t rank) { return *nodes_[rank]->backend; }
  Metrics& metrics(uint32_t rank) { return nodes_[rank]->metrics; }
  ServiceLoop& service(uint32_t rank) { return nodes_[rank]->service; }

 private:
  struct Node {
    Node(const WorldOptions& w, uint32_t rank)
        : backend(make(w, rank)), metrics(info(w, rank)), service(*backend, metrics, loop(w)) {}
    static std::unique_ptr<Backend> make(const WorldOptions& w, uint32_t rank) {
      BackendOptions o;
      o.shape = w.shape;
      if (w.weights) o.weights = w.weights(rank);
      o.rank = rank;
      o.ranks = w.ranks;
      o.lanes = w.lanes;
      o.max_tokens = w.max_tokens;
      o.max_call_tokens = w.max_call_tokens;
      o.linger_us = w.linger_us;
      o.max_pairs = w.max_pairs;
      o.on_lost_rank = w.on_lost_rank;
      o.drills = w.drills;
      o.in_process = true;
      o.stuck_after_ms = w.stuck_after_ms;
      o.park = std::getenv("MOED_NO_PARK") == nullptr;
      if (!w.devices.empty()) o.device = w.devices[rank % w.devices.size()];
      return w.make(std::move(o));
    }
    static MetricsInfo info(const WorldOptions& w, uint32_t rank) {
      MetricsInfo i;
      i.rank = rank;
      i.ranks = w.ranks;
      return i;
    }
    static ServiceOptions loop(const WorldOptions& w) {
      ServiceOptions o;
      o.shape = w.shape;
      o.idle.spin_us = w.spin_us;
      o.lanes = w.lanes;
      o.deadline_ms = o.first_deadline_ms = w.deadline_ms;
      return o;
    }
    std::unique_ptr<Backend> backend;
    Metrics metrics;
    ServiceLoop service;
  };

  WorldOptions options_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::set<std::pair<uint32_t, uint32_t>> links_;  ///< mapped and not lost, the lower rank first
};

}  // namespace moed::test
