// The CUDA back end: segments in exportable GPU memory, links as pictures that passes read, an armed call pass a lane
// and an armed serve pass.
#include <algorithm>
#include <system_error>
#include <thread>

#include "kernels/cuda/lane.h"
#include "kernels/cuda/links.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/serving.h"
#include "kernels/cuda/start_tests.h"

namespace moed {
namespace cuda {
namespace {

constexpr uint32_t kMostLanes = 29, kMostPairs = 32768;
constexpr Nanos kLongestSleep = 5'000'000;  ///< then the queue is filled up again
constexpr Nanos kSpin = 2'000'000, kMoment = 50'000;
constexpr Nanos kShortSleep = 200'000;
constexpr Nanos kLetGo = 2'000'000'000;

/// Finds the GPU of these options; false: why.
bool find(const BackendOptions& o, const Driver*& functions, GpuFacts& gpu, std::string& why) {
  prepare_cuda();
  functions = driver(why);
  return functions != nullptr && find_gpu(*functions, nvml(), o.device, gpu, why);
}

/// A host arena has a copy on the GPU, so every arena counts.
uint64_t total(const BackendOptions& o) {
  const Backend::Memory m = planned(o);
  return m.heap + m.weights + m.scratch + o.lanes * o.arena_bytes;
}

/// What no GPU can do for these options.
ShapeFault unsupported(const BackendOptions& o) {
  ShapeFault fault = check(o.shape, o.ranks, o.max_tokens);
  if (fault.field == nullptr) fault = kernel_fault(o.shape);
  if (fault.field == nullptr && o.lanes > kMostLanes)
    fault = {"lanes", o.lanes, "at most 29: a GPU has 32 queues, and each lane waits in one of its own"};
  if (fault.field == nullptr && o.max_pairs > kMostPairs)
    fault = {"max_pairs", o.max_pairs, "at most 32768: a pass has to end soon"};
  return fault;
}

std::string sentence(const ShapeFault& fault) {
  return std::string(fault.field) + " = " + std::to_string(fault.value) + " is not " + fault.limit;
}

}  // namespace

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(BackendOptions options) : options_(std::move(options)) {
    const ShapeFault fault = unsupported(options_);
    if (fault.field != nullptr) throw std::invalid_argument(sentence(fault));
    std::string why;
    if (!find(options_, driver_, gpu_, why)) throw GpuError(why);
    for (const std::string& lacks : gpu_faults(gpu_, 0)) throw GpuError(lacks);
    for (const std::string& lacks : gpu_faults(gpu_, total(options_)))
      throw std::system_error(ENOMEM, std::generic_category(), lacks);
    need(health_.good(cudaSetDevice(gpu_.ordinal), "first use of the GPU"));
    start(why);
  }
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  ~CudaBackend() override {
    cudaSetDevice(gpu_.ordinal);
    bool gone = true;
    for (const auto& lane : lanes_) gone = lane->close() && gone;
    constexpr uint32_t on = 1;
    gone = side_->to_gpu(world_.world().disarm, &on, sizeof on) && gone;
    gone = side_->word(world_.world().doorbell, static_cast<uint32_t>(host_load(world_.board().rung)) + 1) && gone;
    if (gone && serve_.settle(kLetGo))
      links_->clear();
    else
      static_cast<void>(links_.release());  // what may still be running touches segments: they end with the process
  }

  Status make_segment(int rank, Handle& out) override {
    if (!enter(rank)) return Status::internal;
    std::string why;
    const std::shared_ptr<Segment> segment = segments_->make(static_cast<uint32_t>(rank), why);
    if (!segment) return fail(Status::no_memory, why);
    if (!links_->give(rank, segment)) return lost();
    return segments_->give(segment, out, why) ? Status::ok : fail(Status::internal, why);
  }

  Status make_doorbell(Handle& out) override {
    enter(0);
    std::string why;
    return segments_->give(doorbell_, out, why) ? Status::ok : fail(Status::internal, why);
  }

  Status map_segment(int rank, const Handle& segment, const Handle& doorbell) override {
    if (!enter(rank)) return Status::internal;
    std::shared_ptr<Segment> theirs;
    std::shared_ptr<Segment> bell;
    std::string why;
    const bool rings = doorbell.bytes != 0 && (doorbell.kind != HandleKind::cuda_fd || doorbell.fd);
    if (rings)
      if (const Status s = segments_->take_plain(doorbell, sizeof(Doorbell), bell, why); s != Status::ok)
        return fail(s, why);
    if (const Status s = segments_->take(static_cast<uint32_t>(rank), segment, theirs, why); s != Status::ok)
      return fail(s, why);
    const bool good = links_->change([&](std::vector<Link>& links) {
      links[rank].theirs = theirs;
      links[rank].bell = bell;
      links[rank].state = LinkState::mapped;
    });
    return good ? Status::ok : lost();
  }

  void retire(int rank) override {
    if (!enter(rank)) return;
    links_->change([&](std::vector<Link>& links) {
      if (links[rank].state != LinkState::connecting) links[rank].state = LinkState::lost;
      links[rank].mine = links[rank].theirs = links[rank].bell = nullptr;
    });
  }

  Status open_lane(int lane, ArenaKind kind, uint64_t bytes, LaneMemory& out) override {
    cudaSetDevice(gpu_.ordinal);
    Lane* l = find_lane(lane);
    if (l == nullptr) return fail(Status::internal, "lane " + std::to_string(lane) + " is not configured");
    std::string why;
    const Status s = l->open(kind, bytes, out, why);
    return s == Status::ok ? s : fail(s, why);
  }

  void close_lane(int lane) override {
    cudaSetDevice(gpu_.ordinal);
    if (Lane* l = find_lane(lane)) l->close();
  }
  void set_dry(int lane, bool on) override {
    if (Lane* l = find_lane(lane)) l->set_dry(on);
  }

  Status add_record(int lane, uint32_t number, const Call& call, Nanos timeout) override {
    cudaSetDevice(gpu_.ordinal);
    Lane* l = find_lane(lane);
    std::string why = "lane " + std::to_string(lane) + " is not configured";
    const Status s = l == nullptr ? Status::internal : l->add_record(number, call, timeout, why);
    return s == Status::ok ? s : fail(s, why);
  }

  Status begin(const Begin& begin) override {
    cudaSetDevice(gpu_.ordinal);
    Lane* l = find_lane(begin.lane);
    idle_at_ = now_ns();
    std::string why = "lane " + std::to_string(begin.lane) + " is not configured";
    const Status s = l == nullptr ? Status::internal : l->begin(begin, why);
    return s == Status::ok ? s : fail(s, why);
  }

  bool poll(int lane, Nanos /*now*/, CallRecord& out) override {
    cudaSetDevice(gpu_.ordinal);
    Lane* l = find_lane(lane);
    return l != nullptr && l->poll(out);
  }

  /// Keeps every stream filled and hands out one pass that has ended.
  bool serve(Nanos now, ServeRecord& out) override {
    cudaSetDevice(gpu_.ordinal);
    serve_.keep();
    for (const auto& lane : lanes_) lane->tend();
    serve_.look_whether_stuck(now);
    world_.flip_when_due(options_, *side_, now);
    const Board& board = world_.board();
    const uint64_t records = host_load(board.records);
    if (records == records_) return false;
    serve_.note_traffic(now);
    records_ =
        std::max(records_, records - std::min<uint64_t>(records, kServeRecords / 2));  // older ones are overwritten
    if (!take_tagged(board.served[(records_ + 1) % kServeRecords], records_ + 1, offsetof(ServeRecord, reserved), out))
      return false;
    ++records_;
    out.start = now - std::min<Nanos>(now, out.gather_ns + out.experts_ns + out.send_ns);
    return true;
  }

  void link_changed(int rank, LinkState state, uint32_t session) override {
    if (!enter(rank)) return;
    if (session > kMaxSession || (state == LinkState::ready && session == 0)) {
      static_cast<void>(
          fail(Status::internal, "rank " + std::to_string(rank) + " cannot have session " + std::to_string(session)));
      return;
    }
    links_->change([&](std::vector<Link>& links) {
      Link& link = links[rank];
      if (state == LinkState::ready && (!link.mine || !link.theirs)) return;
      link.state = state;
      link.session = session;
      link.seen = link.seen || state == LinkState::ready;
    });
    wake();
  }

  /// The GPU writes that a call has ended into memory, and wakes nobody: while a call runs, this spins, and sleeps for
  /// moments only when it takes long.
  void sleep(std::span<const FutexWord> words, Nanos until) override {
    const Nanos now = now_ns();
    const bool busy = std::any_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->busy(); });
    if (!busy) idle_at_ = now;
    if (busy && now < idle_at_ + kSpin) return std::this_thread::yield();
    sleep_words_.assign(words.begin(), words.end());
    sleep_words_.insert(sleep_words_.begin(), {futex_address(wake_), wake_seen_});
    // Passes that serve somebody are used up faster than gates end.
    const Nanos longest = busy ? kMoment : serve_.is_busy(now) ? kShortSleep : kLongestSleep;
    futex_wait_any(sleep_words_, std::min(until, now + longest));
    wake_seen_ = wake_.load();
  }
  void wake() override {
    wake_.fetch_add(1);
    futex_wake(futex_address(wake_));
  }

  bool fault(WaitFault& out) override {
    const DeviceFault& slot = world_.board().fault[faults_ % kFaults];
    const uint64_t number = host_load(slot.number);
    if (number <= faults_) return false;
    out = slot.fault;
    faults_ = number;
    return true;
  }

  Waiting waiting() override {
    cudaSetDevice(gpu_.ordinal);
    LoopNeeds needs;
    health_.good(add_call_loops(world_.world(), needs), "attributes of a kernel");
    health_.good(add_serve_loop(world_.world(), needs), "attributes of a kernel");
    cudaDeviceProp gpu{};
    health_.good(cudaGetDeviceProperties(&gpu, gpu_.ordinal), "properties of the GPU");
    const auto share = [&](uint64_t used, double each) {
      return static_cast<double>(used) / (each * gpu.multiProcessorCount);
    };
    return {static_cast<uint32_t>(needs.blocks), static_cast<uint32_t>(gpu.multiProcessorCount),
            share(needs.registers, gpu.regsPerMultiprocessor), share(needs.threads, gpu.maxThreadsPerMultiProcessor),
            share(needs.shared, static_cast<double>(gpu.sharedMemPerMultiprocessor))};
  }

  bool serving() override { return host_load(world_.board().serving) > host_load(world_.board().answered); }
  uint32_t handle_kinds() override { return segments_->kinds(); }
  Status health() override {
    if (!health_.lost()) return Status::ok;
    return fail(health_.stuck() ? Status::internal : Status::device_lost, health_.text());
  }
  std::string last_error() override { return error_; }

  Memory memory() override {
    cudaSetDevice(gpu_.ordinal);
    links_->sweep();
    Memory m;
    m.heap = segments_->live_bytes();
    m.weights = world_.weight_bytes();
    m.scratch = world_.scratch_bytes();
    for (const auto& lane : lanes_) m.arena += lane->arena_bytes();
    return m;
  }

 private:
  void need(bool good) const {
    if (!good) throw GpuError(health_.text());
  }

  Status fail(Status status, std::string text) {
    error_ = std::move(text);
    return status;
  }
  Status lost() { return fail(Status::device_lost, health_.text()); }

  /// Makes our GPU this thread's, and checks the rank.
  bool enter(int rank) {
    cudaSetDevice(gpu_.ordinal);
    if (rank >= 0 && rank < static_cast<int>(options_.ranks)) return true;
    static_cast<void>(fail(Status::internal, "rank " + std::to_string(rank) + " is not of this world"));
    return false;
  }

  Lane* find_lane(int lane) const {
    return lane >= 0 && lane < static_cast<int>(lanes_.size()) ? lanes_[static_cast<size_t>(lane)].get() : nullptr;
  }

  /// Everything that is taken and proven before the back end is ready.
  void start(std::string& why) {
    int least = 0;
    int greatest = 0;
    need(health_.good(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities of streams"));
    need(serve_.make(greatest));  // first, and with the highest priority
    memory_ = std::make_unique<cuda::Memory>(*driver_, gpu_.ordinal);
    side_ = std::make_unique<Side>(*driver_, health_);
    need(side_->make());
    const Status made = world_.make(*memory_, options_, gpu_, *side_, why);
    if (made == Status::no_memory) throw std::system_error(ENOMEM, std::generic_category(), why);
    if (made != Status::ok) throw GpuError(why);
    segments_ =
        std::make_unique<Segments>(*driver_, gpu_.ordinal, *memory_, *side_, health_, options_, world_.world().layout);
    if (!segments_->choose(why)) throw GpuError("handles of the configured kind do not work here: " + why);
    links_ = std::make_unique<Links>(*side_, health_, world_, options_.ranks);
    doorbell_ = segments_->make_plain(sizeof(Doorbell), why);
    if (!doorbell_) throw std::system_error(ENOMEM, std::generic_category(), why);
    world_.set_doorbell(&doorbell_->memory.as<Doorbell>()->wake);
    make_passes(greatest + 1);
    open_own_link(why);
    need(serve_.fill());
  }

  void make_passes(int priority) {
    need(serve_.prepare(*driver_));
    shop_ =
        std::make_unique<Shop>(Shop{*driver_, *memory_, world_, options_, *side_, health_, [this] { serve_.keep(); }});
    std::vector<cudaStream_t> streams;
    for (uint32_t i = 0; i <= options_.lanes; ++i) {  // lane 0 is the daemon's own
      need(lanes_.emplace_back(std::make_unique<Lane>(*shop_, i))->make(priority));
      links_->watch(lanes_.back()->pass());
      streams.push_back(lanes_.back()->pass().stream());
    }
    links_->watch(serve_.stream());
    std::string why;
    if (options_.park && !prove_streams(*shop_, serve_.stream().stream(), streams, why)) throw GpuError(why);
  }

  void open_own_link(std::string& why) {
    const std::shared_ptr<Segment> own = segments_->make(options_.rank, why);
    if (!own) throw std::system_error(ENOMEM, std::generic_category(), why);
    if (!segments_->test_lines(*own, why)) throw GpuError(why);
    need(links_->change(
        [&](std::vector<Link>& links) { links[options_.rank] = {LinkState::ready, 1, true, own, own, doorbell_}; }));
  }

  BackendOptions options_;
  const Driver* driver_ = nullptr;
  GpuFacts gpu_;
  Health health_;
  std::unique_ptr<cuda::Memory> memory_;
  std::unique_ptr<Side> side_;
  DeviceWorld world_;
  std::unique_ptr<Segments> segments_;
  std::shared_ptr<Segment> doorbell_;
  std::unique_ptr<Links> links_;
  std::unique_ptr<Shop> shop_;
  Serving serve_{health_, options_, world_};
  std::vector<std::unique_ptr<Lane>> lanes_;
  static thread_local std::string error_;  ///< of this thread's last call
  std::atomic<uint32_t> wake_{0};
  // The service thread's alone:
  uint32_t wake_seen_ = 0;
  Nanos idle_at_ = 0;
  uint64_t records_ = 0, faults_ = 0;
  std::vector<FutexWord> sleep_words_;
};

thread_local std::string CudaBackend::error_;

}  // namespace cuda

std::unique_ptr<Backend> make_cuda_backend(BackendOptions options) {
  return std::make_unique<cuda::CudaBackend>(std::move(options));
}

Backend::Memory planned_cuda_memory(const BackendOptions& options) { return cuda::planned(options); }

std::vector<std::string> gpu_missing(const BackendOptions& options) {
  const cuda::Driver* functions = nullptr;
  cuda::GpuFacts gpu;
  std::string why;
  std::vector<std::string> all;
  if (const ShapeFault fault = cuda::unsupported(options); fault.field != nullptr) all.push_back(cuda::sentence(fault));
  if (!cuda::find(options, functions, gpu, why)) {
    all.push_back(why);
    return all;
  }
  for (const std::string& lacks : cuda::gpu_faults(gpu, cuda::total(options))) all.push_back(lacks);
  return all;
}

int gpu_count() {
  prepare_cuda();
  std::string why;
  const cuda::Driver* functions = cuda::driver(why);
  return functions == nullptr ? 0 : cuda::count_gpus(*functions, why);
}

std::string cuda_version() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

}  // namespace moed
