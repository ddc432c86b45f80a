// The CPU back end: segments in sealed memory files, links as immutable pictures, one CallPass per lane, one ServePass.
#include <cstring>
#include <map>
#include <stdexcept>
#include <system_error>

#include "daemon/abi/mailbox.h"
#include "kernels/cpu/passes.h"

namespace moed {
namespace cpu {

Doorbell& doorbell_of(const Region& region) { return *reinterpret_cast<Doorbell*>(region.data()); }

void ring(const Region& doorbell) {
  Doorbell& bell = doorbell_of(doorbell);
  std::atomic_ref(bell.wake).fetch_add(1);
  if (std::atomic_ref(bell.asleep).load() != 0) futex_wake(&bell.wake);
}

bool drilling(const Common& common, Nanos now) {
  const Drills& d = common.options.drills;
  return d.for_ms == 0 || now < common.made + uint64_t{d.for_ms} * 1'000'000;
}

void delay(uint32_t us) {
  if (us == 0) return;
  const timespec t = to_timespec(uint64_t{us} * 1000);
  ::nanosleep(&t, nullptr);
}

namespace {

/// Regions that ranks of one process pass to each other by number.
class Shared {
 public:
  static Shared& instance() {
    static Shared shared;
    return shared;
  }
  void add(const std::shared_ptr<Region>& region) {
    const std::lock_guard lock(mutex_);
    region->id = ++last_;
    regions_[region->id] = region;
  }
  std::shared_ptr<Region> find(uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto at = regions_.find(id);
    return at == regions_.end() ? nullptr : at->second.lock();
  }

 private:
  std::mutex mutex_;
  uint64_t last_ = 0;
  std::map<uint64_t, std::weak_ptr<Region>> regions_;
};

std::shared_ptr<Region> make_region(const char* name, uint64_t bytes) {
  auto region = std::make_shared<Region>();
  region->fd = make_sealed_memory(name, bytes);
  if (!region->fd) return nullptr;
  region->mapping = Mapping(region->fd, bytes);
  return region->mapping ? region : nullptr;
}

SegmentHeader read_header(const Region& region) {
  SegmentHeader header;
  load_payload(*reinterpret_cast<const Line*>(region.data()), &header, sizeof header);
  return header;
}

}  // namespace

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(BackendOptions options) {
    const ShapeFault fault = check(options.shape, options.ranks, options.max_tokens);
    if (fault.field != nullptr)
      throw std::invalid_argument(std::string(fault.field) + " = " + std::to_string(fault.value) + " is not " +
                                  fault.limit);
    common_.layout = segment_layout(options.shape, options.lanes, options.max_tokens);
    common_.made = now_ns();
    common_.options = std::move(options);
    common_.doorbell = make_region("moed-doorbell", sizeof(Doorbell));
    if (!common_.doorbell) throw std::system_error(errno, std::generic_category(), "no memory for a doorbell");
    auto links = std::make_shared<Links>(common_.options.ranks);
    Link& own = (*links)[common_.options.rank];
    own.mine = own.theirs = new_segment(common_.options.rank);
    if (!own.mine)
      throw std::system_error(errno, std::generic_category(),
                              "no memory for a segment of " + std::to_string(common_.layout.bytes) + " bytes");
    own.doorbell = common_.doorbell;
    own.state = LinkState::ready;
    own.session = 1;
    own.seen = true;
    links_ = links;
    for (uint32_t lane = 0; lane < common_.layout.lanes_all; ++lane)
      lanes_.push_back(std::make_unique<Lane>(common_, lane));
    serve_ = std::make_unique<ServePass>(common_);
  }

  Status make_segment(int rank, Handle& out) override {
    if (!known(rank)) return fail(Status::internal, "rank " + std::to_string(rank) + " is not of this world");
    sweep();
    const std::shared_ptr<Region> region = new_segment(static_cast<uint32_t>(rank));
    if (!region)
      return fail(Status::no_memory, "no memory for a segment of " + std::to_string(common_.layout.bytes) + " bytes");
    update([&](Links& links) { links[rank].mine = region; });
    return export_region(region, common_.layout.bytes, out);
  }

  Status make_doorbell(Handle& out) override { return export_region(common_.doorbell, sizeof(Doorbell), out); }

  Status map_segment(int rank, const Handle& segment, const Handle& doorbell) override {
    if (!known(rank)) return fail(Status::internal, "rank " + std::to_string(rank) + " is not of this world");
    std::shared_ptr<Region> theirs;
    std::shared_ptr<Region> bell;
    if (const Status s = import_region(segment, common_.layout.bytes, theirs); s != Status::ok) return s;
    if (const Status s = import_region(doorbell, sizeof(Doorbell), bell); s != Status::ok) return s;
    const SegmentHeader header = read_header(*theirs);
    const SegmentHeader wanted = header_of(static_cast<uint32_t>(rank), common_.options.rank);
    if (std::memcmp(&header, &wanted, sizeof header) != 0)
      return fail(Status::internal, "segment of rank " + std::to_string(rank) + " has another header: layout digest " +
                                        std::to_string(header.digest) + ", here " + std::to_string(wanted.digest));
    update([&](Links& links) {
      links[rank].theirs = theirs;
      links[rank].doorbell = bell;
      links[rank].state = LinkState::mapped;
    });
    return Status::ok;
  }

  void retire(int rank) override {
    if (!known(rank)) return;
    update([&](Links& links) {
      Link& link = links[rank];
      if (link.state != LinkState::connecting) link.state = LinkState::lost;
      link.mine = link.theirs = link.doorbell = nullptr;
    });
    sweep();
  }

  Status open_lane(int lane, ArenaKind kind, uint64_t bytes, LaneMemory& out) override {
    if (kind != ArenaKind::host) return fail(Status::unsupported, "a CPU daemon has no GPU arena; ask for host memory");
    if (lane < 0 || lane >= static_cast<int>(lanes_.size()))
      return fail(Status::internal, "lane " + std::to_string(lane) + " is not configured");
    Fd arena = make_sealed_memory("moed-arena", bytes);
    Fd mailbox = make_sealed_memory("moed-mailbox", sizeof(HostMailbox));
    Mapping mapping = arena ? Mapping(arena, bytes) : Mapping();
    if (!mapping || !mailbox)
      return fail(Status::no_memory,
                  "no memory for an arena of " + std::to_string(bytes) + " bytes: " + std::strerror(errno));
    Lane& l = *lanes_[lane];
    {
      const std::lock_guard lock(l.mutex);
      try {
        l.pass.reserve();
      } catch (const std::bad_alloc&) {
        return fail(Status::no_memory, "no memory for the ids and weights of limits.max_call_tokens tokens");
      }
      l.pass.abandon();
      l.arena = std::move(mapping);
      l.dry = false;
      l.arena_bytes.store(bytes, std::memory_order_relaxed);
    }
    out.host_mailbox = std::move(mailbox);
    out.arena = std::move(arena);
    out.arena_bytes = bytes;
    return Status::ok;
  }

  void close_lane(int lane) override {
    Lane& l = *lanes_[lane];
    Mapping arena;  // unmapped after the lock is given back
    const std::lock_guard lock(l.mutex);
    l.pass.abandon();
    l.arena_bytes.store(0, std::memory_order_relaxed);
    arena = std::move(l.arena);
  }

  void set_dry(int lane, bool on) override {
    Lane& l = *lanes_[lane];
    const std::lock_guard lock(l.mutex);
    l.dry = on;
  }

  Status begin(const Begin& begin) override {
    Lane& l = *lanes_[begin.lane];
    const std::lock_guard lock(l.mutex);
    if (!l.arena) return fail(Status::internal, "lane " + std::to_string(begin.lane) + " is not open");
    if (l.pass.busy()) return fail(Status::busy, "lane " + std::to_string(begin.lane) + " has a call in flight");
    l.pass.begin(begin, present(), l.arena.data(), l.arena.bytes(), l.dry);
    return Status::ok;
  }

  bool poll(int lane, Nanos now, CallRecord& out) override {
    Lane& l = *lanes_[lane];
    const std::lock_guard lock(l.mutex);
    return l.pass.busy() && l.pass.poll(now, *present(), out);
  }

  bool serve(Nanos now, ServeRecord& out) override {
    wake_before_ = wake_now_;
    wake_now_ = std::atomic_ref(doorbell_of(*common_.doorbell).wake).load();
    return serve_->step(now, present(), out);
  }

  void link_changed(int rank, LinkState state, uint32_t session) override {
    if (!known(rank) || session > kMaxSession || (state == LinkState::ready && session == 0)) {
      static_cast<void>(
          fail(Status::internal, "rank " + std::to_string(rank) + " cannot have session " + std::to_string(session)));
      return;
    }
    update([&](Links& links) {
      Link& link = links[rank];
      if (state == LinkState::ready && (!link.mine || !link.theirs || !link.doorbell)) return;
      link.state = state;
      link.session = session;
      link.seen = link.seen || state == LinkState::ready;
    });
    wake();
  }

  void sleep(std::span<const FutexWord> words, Nanos until) override {
    if (serve_->lingering() && !serve_->running()) return;  // for microseconds: not worth a sleep
    Doorbell& bell = doorbell_of(*common_.doorbell);
    std::atomic_ref(bell.asleep).store(1);
    std::vector<FutexWord>& all = sleep_words_;
    all.clear();
    all.push_back({&bell.wake, wake_before_});  // as it was before the last whole look
    all.insert(all.end(), words.begin(), words.end());
    futex_wait_any(all, until);
    std::atomic_ref(bell.asleep).store(0);
    serve_->woke(now_ns());
  }

  void wake() override { ring(*common_.doorbell); }
  bool serving() override { return serve_->busy(); }
  uint32_t handle_kinds() override { return 1U << static_cast<uint32_t>(HandleKind::memfd); }
  Status health() override { return Status::ok; }

  std::string last_error() override {
    const std::lock_guard lock(error_mutex_);
    return error_;
  }

  Memory memory() override {
    sweep();
    Memory m = planned_memory(common_.options);  // weights and scratch are what was planned
    m.heap = 0;
    for (const Link& link : *links_now()) m.heap += link.mine ? link.mine->mapping.bytes() : 0;
    for (const auto& lane : lanes_) m.arena += lane->arena_bytes.load(std::memory_order_relaxed);
    return m;
  }

 private:
  struct Lane {
    Lane(const Common& common, uint32_t lane) : pass(common, lane) {}
    std::mutex mutex;  // control opens and closes, service begins and polls
    Mapping arena;
    std::atomic<uint64_t> arena_bytes{0};  // for memory(), which must not wait for the service thread
    bool dry = false;
    CallPass pass;
  };

  bool known(int rank) const { return rank >= 0 && rank < static_cast<int>(common_.options.ranks); }

  Status fail(Status status, std::string text) {
    const std::lock_guard lock(error_mutex_);
    error_ = std::move(text);
    return status;
  }

  SegmentHeader header_of(uint32_t owner, uint32_t writer) const {
    SegmentHeader header;
    header.owner = owner;
    header.writer = writer;
    header.bytes = common_.layout.bytes;
    header.digest = layout_digest(common_.layout);
    return header;
  }

  std::shared_ptr<Region> new_segment(uint32_t writer) const {
    std::shared_ptr<Region> region = make_region("moed-segment", common_.layout.bytes);
    if (!region) return nullptr;
    const SegmentHeader header = header_of(common_.options.rank, writer);
    store_line(*reinterpret_cast<Line*>(region->data()), &header, sizeof header, 1);
    return region;
  }

  Status export_region(const std::shared_ptr<Region>& region, uint64_t bytes, Handle& out) {
    out.bytes = bytes;
    if (common_.options.in_process) {
      if (region->id == 0) Shared::instance().add(region);
      out.kind = HandleKind::address;
      std::memcpy(out.token.data(), &region->id, sizeof region->id);
      return Status::ok;
    }
    out.kind = HandleKind::memfd;
    out.fd = region->fd.duplicate();
    return out.fd ? Status::ok : fail(Status::no_memory, "no descriptor left");
  }

  Status import_region(const Handle& handle, uint64_t bytes, std::shared_ptr<Region>& out) {
    if (handle.bytes != bytes)
      return fail(Status::internal,
                  "a handle of " + std::to_string(handle.bytes) + " bytes, here " + std::to_string(bytes));
    if (handle.kind == HandleKind::address && common_.options.in_process) {
      uint64_t id = 0;
      std::memcpy(&id, handle.token.data(), sizeof id);
      out = Shared::instance().find(id);
      return out ? Status::ok : fail(Status::internal, "the memory behind a handle is gone");
    }
    if (handle.kind != HandleKind::memfd)
      return fail(Status::unsupported,
                  "handle kind " + std::to_string(static_cast<uint32_t>(handle.kind)) + ", here memfd");
    constexpr int seals = F_SEAL_GROW | F_SEAL_SHRINK;
    const int have = ::fcntl(handle.fd.get(), F_GET_SEALS);
    if (have < 0 || (have & seals) != seals || ::lseek(handle.fd.get(), 0, SEEK_END) != static_cast<off_t>(bytes))
      return fail(Status::internal, "a memory file that is not sealed at " + std::to_string(bytes) + " bytes");
    out = std::make_shared<Region>();
    out->mapping = Mapping(handle.fd, bytes);
    return out->mapping ? Status::ok : fail(Status::no_memory, std::string("mapping failed: ") + std::strerror(errno));
  }

  template <class Change>
  void update(Change change) {
    const std::lock_guard lock(links_mutex_);
    auto next = std::make_shared<Links>(*links_);
    change(*next);
    old_.push_back(std::exchange(links_, std::move(next)));
    version_.fetch_add(1, std::memory_order_release);
  }

  /// Frees the pictures that no pass holds any more, and with them retired memory. This list holds each picture at
  /// least as long as the service thread does, so that the service thread never unmaps.
  void sweep() {
    const std::lock_guard lock(links_mutex_);
    std::erase_if(old_, [](const std::shared_ptr<const Links>& picture) { return picture.use_count() == 1; });
  }

  std::shared_ptr<const Links> links_now() {
    const std::lock_guard lock(links_mutex_);
    return links_;
  }

  /// The service thread's own copy of the picture, renewed when it changed.
  const std::shared_ptr<const Links>& present() {
    const uint64_t version = version_.load(std::memory_order_acquire);
    if (version != seen_version_) {
      present_ = links_now();
      seen_version_ = version;
    }
    return present_;
  }

  Common common_;
  std::mutex links_mutex_;
  std::shared_ptr<const Links> links_;
  std::vector<std::shared_ptr<const Links>> old_;  // earlier pictures, until the last pass that uses them has ended
  std::atomic<uint64_t> version_{1};
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::mutex error_mutex_;
  std::string error_;
  // The service thread's alone:
  std::shared_ptr<const Links> present_;
  uint64_t seen_version_ = 0;
  uint32_t wake_before_ = 0, wake_now_ = 0;
  std::vector<FutexWord> sleep_words_;
  std::unique_ptr<ServePass> serve_;  // last: its thread uses what is above
};

}  // namespace cpu

std::unique_ptr<Backend> make_cpu_backend(BackendOptions options) {
  return std::make_unique<cpu::CpuBackend>(std::move(options));
}

Backend::Memory planned_memory(const BackendOptions& o) {
  const SegmentLayout layout = segment_layout(o.shape, o.lanes, o.max_tokens);
  Backend::Memory m;
  m.heap = layout.bytes * o.ranks;
  const uint64_t pairs = cpu::pass_pairs(o);
  const uint64_t rows = pairs / o.shape.top_k;
  m.scratch = (pairs * o.shape.latent + cpu::experts_scratch(o.shape)) * sizeof(float) +
              rows * row_layout(o.shape).bytes + pairs * (sizeof(Pair) + sizeof(uint32_t)) + rows * sizeof(Rows::Place);
  for (const LayerWeights& layer : o.weights.layers)
    m.weights += layer.experts.size() * expert_bytes(o.shape) + layer.norm.size() * sizeof(uint16_t);
  return m;
}

}  // namespace moed
