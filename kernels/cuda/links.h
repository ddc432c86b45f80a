// The host's half of links: their state and segments, and the pictures of them that passes read.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/armed.h"
#include "kernels/cuda/segments.h"
#include "kernels/cuda/side.h"

namespace moed::cuda {

struct Link {
  LinkState state = LinkState::connecting;
  uint32_t session = 0;
  bool seen = false;
  std::shared_ptr<Segment> mine, theirs;
  std::shared_ptr<Segment> bell{};  ///< theirs; nullptr: they have none
};

class Links {
 public:
  Links(Side& side, Health& health, const DeviceWorld& world, uint32_t ranks)
      : side_(side), health_(health), world_(world), links_(ranks) {}

  /// Streams whose passes read pictures: all lanes' and then the serving one, before the first change.
  void watch(Armed& stream) { streams_.push_back(&stream); }

  /// Changes the picture: passes that begin from now on read the new one. What the old one alone held is freed when no
  /// pass that began with it runs any more. False: the GPU does not let go of old pictures.
  bool change(const std::function<void(std::vector<Link>&)>& how);
  /// Notes the segment that `rank` may write here; passes see it from the next change on, which a link needs to become
  /// ready.
  bool give(int rank, const std::shared_ptr<Segment>& segment);
  /// Frees what nothing uses any more.
  void sweep();
  /// Drops everything, after the last pass has ended.
  void clear();

 private:
  /// A picture that was replaced: what it keeps alive, where it lies, and how many loops had begun by then.
  struct Old {
    std::vector<Link> links;
    uint32_t slot;
    std::vector<uint64_t> begun;
  };
  bool ended(const Old& old) const;
  void sweep_locked();
  bool write(uint32_t slot, const std::vector<Link>& links);

  Side& side_;
  Health& health_;
  const DeviceWorld& world_;
  mutable std::mutex mutex_;
  std::vector<Armed*> streams_;
  std::vector<Link> links_;
  std::vector<Old> old_;
  uint32_t slot_ = 0;
};

}  // namespace moed::cuda
