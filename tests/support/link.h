// One half of a link between two back ends of this process.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "kernels/backend.h"

namespace moed::test {

/// `owner` gives `writer` a segment and its doorbell, and `writer` maps them.
inline void give_segment(Backend& owner_end, uint32_t owner, Backend& writer_end, uint32_t writer) {
  Handle segment;
  Handle doorbell;
  if (owner_end.make_segment(static_cast<int>(writer), segment) != Status::ok ||
      owner_end.make_doorbell(doorbell) != Status::ok)
    throw std::runtime_error(owner_end.last_error());
  if (writer_end.map_segment(static_cast<int>(owner), segment, doorbell) != Status::ok)
    throw std::runtime_error(writer_end.last_error());
}

}  // namespace moed::test
