// The two passes of the CPU back end as state machines: a CallPass per lane, stepped by the service thread, and one
// ServePass with a thread of its own.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/backend.h"
#include "kernels/steps.h"

namespace moed::cpu {

/// Memory of one segment or doorbell, mapped once in this process; unmapped when the last pass that uses it has ended.
struct Region {
  Mapping mapping;
  Fd fd;
  uint64_t id = 0;  ///< of the process-wide table behind HandleKind::address
  std::byte* data() const { return mapping.data(); }
};

/// One end of a link as passes see it.
struct Link {
  LinkState state = LinkState::connecting;
  uint32_t session = 0;
  bool seen = false;                 ///< was ready once
  std::shared_ptr<Region> mine;      ///< what that rank writes here
  std::shared_ptr<Region> theirs;    ///< what we write there
  std::shared_ptr<Region> doorbell;  ///< theirs
};

/// An immutable picture of all links. A pass keeps the one that it began with.
using Links = std::vector<Link>;

/// What both passes know and never change.
struct Common {
  BackendOptions options;
  SegmentLayout layout;
  std::shared_ptr<Region> doorbell;  ///< our own
  Nanos made = 0;                    ///< when the back end was made
};

/// Most (row, local expert) pairs of one pass: one whole call always fits.
inline uint64_t pass_pairs(const BackendOptions& o) {
  const uint64_t call = uint64_t{o.shape.top_k} * o.max_tokens;
  return call > o.max_pairs ? call : o.max_pairs;
}

Doorbell& doorbell_of(const Region& region);
/// Wakes the owner of a doorbell if it sleeps.
void ring(const Region& doorbell);
/// True while the drills of `options` are on.
bool drilling(const Common& common, Nanos now);
void delay(uint32_t us);

class CallPass {
 public:
  explicit CallPass(const Common& common, uint32_t lane) : common_(common), lane_(lane) {}

  bool busy() const { return state_ != State::idle; }
  /// Room for the routing of the largest call, so that no call allocates. May throw std::bad_alloc.
  void reserve();
  /// Takes a call; links: the present picture; arena: the lane's.
  void begin(const Begin& begin, std::shared_ptr<const Links> links, std::byte* arena, uint64_t arena_bytes, bool dry);
  /// Advances; true once when the call has ended.
  bool poll(Nanos now, const Links& present, CallRecord& out);
  /// Gives the call up: its count is consumed, nothing is written any more.
  void abandon() {
    state_ = State::idle;
    links_.reset();
  }

 private:
  enum class State { idle, waiting, ended };

  Status read_routing();
  bool usable(const RankSet& needed);
  void start_piece(Nanos now);
  void collect(Nanos now, const Links& present);
  void waited_in_vain(uint32_t rank, Nanos now);
  void finish_piece(Nanos now);
  void end(Status status, Nanos now);
  uint32_t piece_tokens() const;
  const int32_t* piece_ids() const { return ids_.data() + uint64_t{done_} * common_.options.shape.top_k; }

  const Common& common_;
  const uint32_t lane_;
  State state_ = State::idle;
  Begin begin_{};
  std::shared_ptr<const Links> links_;
  std::byte* arena_ = nullptr;
  uint64_t arena_bytes_ = 0;
  uint64_t count_ = 0;           ///< the lane's; goes on over attaches
  uint32_t valid_ = 0;           ///< tokens that are not padding
  uint32_t done_ = 0;            ///< tokens of finished pieces
  std::vector<int32_t> ids_;     ///< [valid, K], private and checked
  std::vector<float> weights_;   ///< [valid, K]
  std::vector<Destination> to_;  ///< of the present piece, by rank
  RankSet waiting_, in_, out_;   ///< not heard, answered, lost
  Nanos waited_from_ = 0;
  Status good_ = Status::ok;  ///< what a call that worked ends as: ok, masked or degraded
  CallRecord record_{};
};

class ServePass {
 public:
  explicit ServePass(const Common& common);
  ~ServePass();
  ServePass(const ServePass&) = delete;
  ServePass& operator=(const ServePass&) = delete;

  /// Looks at all call lines, starts a pass or collects one. True: one has ended.
  bool step(Nanos now, const std::shared_ptr<const Links>& links, ServeRecord& out);
  /// Whether a call line has been seen that no pass has taken yet: no time to sleep.
  bool lingering() const { return first_pending_ != 0; }
  bool running() const { return state_.load(std::memory_order_relaxed) == static_cast<uint32_t>(State::running); }
  /// From any thread: a pass runs or is not collected yet.
  bool busy() const { return state_.load(std::memory_order_relaxed) != static_cast<uint32_t>(State::idle); }
  void woke(Nanos now) { last_look_ = now > last_look_ ? now : last_look_; }

 private:
  enum class State : uint32_t { idle, running, ended, stop };
  struct Watch {
    uint64_t served = 0;   ///< sequence last taken
    uint64_t pending = 0;  ///< sequence seen and not taken, 0: none
    Nanos since = 0;       ///< end of the last look that did not show it
    uint32_t recent = 0;   ///< passes that it may still miss before nobody lingers for it
    uint32_t retries = 0;  ///< passes in a row in which its rows were incomplete
  };

  void look(Nanos now, const Links& links);
  bool worth_starting(Nanos now) const;
  void choose(Nanos now, const std::shared_ptr<const Links>& links);
  void settle(ServeRecord& out);
  void work();
  void flip(Nanos now);
  void run();

  const Common& common_;
  bool flipped_ = false;
  std::vector<Watch> watch_;  ///< [rank, lane]
  Nanos last_look_ = 0;
  Nanos first_pending_ = 0;
  uint32_t next_ = 0;  ///< where the next pass starts looking: after the one served last
  std::shared_ptr<const Links> links_;
  std::vector<Source> sources_;
  Rows rows_;
  Plan plan_;
  std::unique_ptr<float[]> pairs_;
  std::unique_ptr<float[]> scratch_;
  ServeRecord record_{};
  std::atomic<uint32_t> state_{0};
  std::thread thread_;
};

}  // namespace moed::cpu
