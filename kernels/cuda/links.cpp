#include "kernels/cuda/links.h"

#include <algorithm>
#include <thread>

namespace moed::cuda {
namespace {

constexpr Nanos kLetGo = 10'000'000'000;  ///< passes end within milliseconds, those of slow experts within a second

}  // namespace

/// Whether every loop that had begun when this picture was replaced has ended, and what it left to others.
bool Links::ended(const Old& old) const {
  for (size_t i = 0; i < streams_.size(); ++i)
    if (streams_[i]->completed() < old.begun[i]) return false;
  return true;
}

void Links::sweep_locked() {
  std::erase_if(old_, [this](const Old& old) { return ended(old); });
}

void Links::sweep() {
  const std::lock_guard lock(mutex_);
  sweep_locked();
}

void Links::clear() {
  const std::lock_guard lock(mutex_);
  old_.clear();
  links_.clear();
}

/// The picture first, then the word that says that it is the present one, then nothing until both are there.
bool Links::write(uint32_t slot, const std::vector<Link>& links) {
  Picture picture{};
  // A call that has ended may still be looked after at a rank that is gone by now: it finds a segment there, this
  // rank's.
  const std::shared_ptr<Segment>& own = links[world_.world().rank].mine;
  for (size_t r = 0; r < links.size(); ++r) {
    DeviceLink& link = picture.link[r];
    if (const std::shared_ptr<Segment>& mine = links[r].mine ? links[r].mine : own)
      link.mine = mine->memory.as<std::byte>();
    if (links[r].theirs) link.theirs = links[r].theirs->memory.as<std::byte>();
    if (links[r].bell) link.bell = &links[r].bell->memory.as<Doorbell>()->wake;
    link.session = links[r].session;
    link.state = links[r].state;
    link.seen = links[r].seen ? 1 : 0;
  }
  const World& w = world_.world();
  return side_.to_gpu(&w.pictures[slot], &picture, sizeof picture) && side_.word(w.present, slot) && side_.settle();
}

bool Links::give(int rank, const std::shared_ptr<Segment>& segment) {
  {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Segment>& mine = links_[static_cast<size_t>(rank)].mine;
    if (!mine) {
      mine = segment;
      return true;
    }
  }
  return change([&](std::vector<Link>& links) { links[static_cast<size_t>(rank)].mine = segment; });
}

bool Links::change(const std::function<void(std::vector<Link>&)>& how) {
  const std::lock_guard lock(mutex_);
  const uint32_t next = (slot_ + 1) % kPictures;
  const auto taken = [&] {
    return std::any_of(old_.begin(), old_.end(), [&](const Old& o) { return o.slot == next; });
  };
  for (const Nanos until = now_ns() + kLetGo; taken();) {
    sweep_locked();
    if (now_ns() > until) return health_.good(cudaErrorLaunchTimeout, "passes that do not end");
    std::this_thread::yield();
  }
  std::vector<Link> links = links_;
  how(links);
  if (!write(next, links)) return false;
  // A pass says that it has begun before it looks which picture is present: either it has the new one or it is counted.
  Old& old = old_.emplace_back(Old{std::exchange(links_, std::move(links)), std::exchange(slot_, next), {}});
  old.begun.resize(streams_.size());
  if (!side_.from_gpu(old.begun.data(), world_.world().begun, old.begun.size() * sizeof(uint64_t))) return false;
  for (size_t i = 0; i < streams_.size(); ++i)
    if (streams_[i]->completed() < old.begun[i] && !health_.good(streams_[i]->mark(), "marker of a stream"))
      return false;
  sweep_locked();
  return true;
}

}  // namespace moed::cuda
