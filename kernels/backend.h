// The seam between the daemon and what computes: one pass at a time, everything try-only, because on a GPU no CPU
// stands between the steps of a pass.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "daemon/abi/call.h"
#include "daemon/abi/fd.h"
#include "daemon/abi/futex.h"
#include "daemon/abi/record.h"
#include "daemon/abi/shape.h"
#include "daemon/abi/status.h"
#include "kernels/experts.h"

namespace moed {

enum class HandleKind : uint32_t {
  memfd = 1,
  cuda_fd = 2,
  fabric = 3,
  address = 4,  ///< several ranks in one process (tests); never taken from the network
};

/// What a peer needs to map a segment or a doorbell. Opaque to control: 64 bytes and, for the fd kinds, a descriptor.
struct Handle {
  HandleKind kind = HandleKind::memfd;
  uint64_t bytes = 0;
  std::array<std::byte, 64> token{};
  Fd fd;
};

enum class ArenaKind : uint32_t { host = 0, gpu = 1 };
enum class LinkState : uint32_t { connecting = 0, mapped = 1, ready = 2, lost = 3 };
enum class OnLostRank : uint32_t { fail = 0, drop = 1 };

/// What an engine maps, sent in this order. The back end keeps mappings of its own.
struct LaneMemory {
  Fd host_mailbox, device_mailbox, arena;
  uint64_t arena_bytes = 0;
};

/// Faults for drills, all 0 unless configured. for_ms: the delays end so long after the back end was made; 0: never.
/// flip_after_ms: so long after, one bit of one expert's weights flips where the back end has them; 0: never; on the
/// CPU their memory has to be writable.
struct Drills {
  uint32_t experts_delay_us = 0, loop_delay_us = 0, send_delay_us = 0, call_delay_us = 0, for_ms = 0;
  uint32_t flip_layer = 0, flip_expert = 0, flip_after_ms = 0;
};

/// What a back end is made of. Making one throws std::invalid_argument when the shape does not pass check(), and
/// std::system_error when there is no memory.
struct BackendOptions {
  Shape shape;
  ModelWeights weights;
  uint32_t rank = 0, ranks = 1;
  uint32_t lanes = 2, max_tokens = 128, max_call_tokens = 65536;
  OnLostRank on_lost_rank = OnLostRank::fail;
  uint32_t linger_us = 3, max_pairs = 8192;
  Drills drills{};
  uint64_t incarnation = 1;
  bool in_process = false;  ///< give and take HandleKind::address
  // CUDA alone:
  std::string device = "0";     ///< ordinal or UUID of the GPU
  uint64_t arena_bytes = 0;     ///< the most that an attach may ask for: room for all lanes' is looked for at start
  uint32_t stuck_after_ms = 0;  ///< a GPU on which no pass begins or ends for so long stands still; 0: never
  /// Variants to measure, none of them for service: see docs/performance.md.
  struct Tuning {
    uint32_t call_blocks = 0, serve_blocks = 0;  ///< of a loop; 0: from the GPU's multiprocessors and the lanes
    bool fence = false;                          ///< out is made visible by a fence, not stored by exchanges
    bool unsettled = false;                      ///< out is not waited for at all: unsafe
    bool long_way = false;                       ///< every call through the kernels behind the loops
  } tuning{};
  bool park = true;  ///< idle lanes wait by stream memory operations; off under tools that run one launch at a time
  std::optional<HandleKind> handles;  ///< nothing: the best kind that this machine can really export and import
};

/// A GPU that is missing, unusable or lost: one sentence with its remedy.
struct GpuError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// One call to begin. refuse: a status (draining) that ends the call at once with zeros; ok: run it.
struct Begin {
  int lane = 0;
  uint64_t number = 0;  ///< of the attach's calls
  Call call{};
  Nanos seen = 0;      ///< when the bell was seen; times and the deadline count from here
  Nanos deadline = 0;  ///< absolute
  Status refuse = Status::ok;
};

/// A wait that ended in vain: who waited, for whom, for what, and what was there instead.
enum class Awaited : uint32_t { return_line = 0, row = 1, partial = 2 };
struct WaitFault {
  Awaited what = Awaited::return_line;
  uint32_t rank = 0;  ///< whose line did not come
  uint32_t lane = 0;  ///< of the source
  uint32_t token = 0;
  uint64_t awaited = 0, seen = 0;  ///< sequences
  uint64_t waited_ns = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Before ready, and from the control thread.

  /// New, zeroed memory that `rank` may write here. no_memory when there is none.
  virtual Status make_segment(int rank, Handle& out) = 0;
  virtual Status make_doorbell(Handle& out) = 0;
  /// Imports, maps and touches what `rank` gave us. unsupported: a kind that cannot be imported; internal: header
  /// differs.
  virtual Status map_segment(int rank, const Handle& segment, const Handle& doorbell) = 0;
  /// Both segments of the link: freed when no pass begun before uses them.
  virtual void retire(int rank) = 0;
  /// Lane memory for one attach. no_memory, or unsupported for an arena kind that this back end lacks.
  virtual Status open_lane(int lane, ArenaKind kind, uint64_t bytes, LaneMemory& out) = 0;
  /// Ends what runs within 2 ms, then frees.
  virtual void close_lane(int lane) = 0;
  virtual void set_dry(int lane, bool on) = 0;
  /// Registers a stream call under a number that bells of this lane name from then on, 1..4096; a lane with a GPU
  /// arena. Its fields are checked here, once: bad_call. timeout: of each such call. unsupported: this back end has no
  /// stream calls.
  virtual Status add_record(int /*lane*/, uint32_t /*number*/, const Call& /*call*/, Nanos /*timeout*/) {
    return Status::unsupported;
  }

  // From the service loop.

  /// Takes a call: from here it ends in exactly one poll(), whatever its fields hold (they are checked first). busy:
  /// the lane has a call in flight.
  virtual Status begin(const Begin& begin) = 0;
  /// True once, when the lane's call has ended.
  virtual bool poll(int lane, Nanos now, CallRecord& out) = 0;
  /// Starts or collects a serve pass; true: one has ended and `out` describes it.
  virtual bool serve(Nanos now, ServeRecord& out) = 0;
  /// A lost rank ends the calls that wait for it. Ready needs a mapped segment.
  virtual void link_changed(int rank, LinkState state, uint32_t session) = 0;
  /// Sleeps until one of `words` moves or there is something to poll or serve, at the latest until `until`.
  virtual void sleep(std::span<const FutexWord> words, Nanos until) = 0;
  /// Wakes sleep() from another thread.
  virtual void wake() = 0;
  /// The next fault that was not handed out yet. A back end whose waits are looked at by the service loop itself has
  /// none: what its calls waited for is in their records.
  virtual bool fault(WaitFault& /*out*/) { return false; }
  /// Whether a serve pass runs or a call waits to be taken by one. From any thread.
  virtual bool serving() = 0;
  /// Kinds of handles that this back end gives and takes: bit 1 << HandleKind.
  virtual uint32_t handle_kinds() = 0;
  /// Sticky: anything but ok means that this process has to end. device_lost: the GPU's context failed; internal: the
  /// GPU stands still.
  virtual Status health() = 0;
  /// One sentence for the status returned last to this thread's caller.
  virtual std::string last_error() = 0;
  /// Bytes by kind: heap, weights, arena, scratch.
  struct Memory {
    uint64_t heap = 0, weights = 0, arena = 0, scratch = 0;
  };
  virtual Memory memory() = 0;
  /// What blocks that wait for calls take of a GPU while somebody calls: how many there are, one on a multiprocessor as
  /// a rule, and their share of all registers, threads and shared memory.
  struct Waiting {
    uint32_t blocks = 0, multiprocessors = 0;
    double registers = 0, threads = 0, shared_memory = 0;
  };
  virtual Waiting waiting() { return {}; }
};

/// The CPU back end: the specification. Its own link is ready, session 1, from the start.
std::unique_ptr<Backend> make_cpu_backend(BackendOptions options);

/// What a back end of these options will take before it is ready, without making it.
Backend::Memory planned_memory(const BackendOptions& options);

// The CUDA back end, in builds that have it (MOED_HAS_CUDA): the same passes in GPU memory.

/// Throws GpuError when there is no GPU that it can use, std::invalid_argument for a shape without a kernel and
/// std::system_error when the GPU's memory does not suffice.
std::unique_ptr<Backend> make_cuda_backend(BackendOptions options);
Backend::Memory planned_cuda_memory(const BackendOptions& options);
/// What this machine lacks for these options: sentences with a remedy; empty: nothing.
std::vector<std::string> gpu_missing(const BackendOptions& options);
/// Sets the environment that the driver reads when it starts. A process with threads calls it before it has them; the
/// other functions call it, too, and then find it done.
void prepare_cuda();
/// GPUs that this process can use; 0 without a driver.
int gpu_count();
/// Version of the CUDA toolkit that the kernels were built with, such as 13.0.
std::string cuda_version();

}  // namespace moed
