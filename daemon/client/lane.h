// What libmoed keeps of a lane, and the parts of it that talk over the socket.
#pragma once

#include <cstdint>

#include "daemon/abi/attach.h"
#include "daemon/abi/mailbox.h"
#include "daemon/abi/shape.h"
#include "daemon/client/connect.h"
#include "daemon/client/moed.h"

/// The C ABI's opaque lane.
struct moed_lane {
  moed::SocketPath path = {};
  moed::Attach request;  // said again at re-attach
  moed::Fd lease;
  moed::Mapping mailbox_memory;
  moed::HostMailbox* mailbox = nullptr;
  moed::Mapping arena;
  moed::Info info;
  moed::Nanos deadline = 0, first_deadline = 0, spin = 0;
  uint64_t number = 0;    // of the last call submitted
  bool had_good = false;  // a call ended ok, so first_deadline no longer holds
  bool lost = false;
  uint32_t answers_owed = 0;  // by requests that were given up
  moed::Nanos lease_checked = 0;
  mutable moed::Sentence error;
};

namespace moed {

/// moed_attach, moed_reattach and moed_dry. May throw std::bad_alloc; a status other than ok comes with a sentence.
Status attach(moed_lane& lane, const char* socket, const moed_options* options, Sentence& why);
Status reattach(moed_lane& lane, Sentence& why);
Status set_dry(moed_lane& lane, bool on, Sentence& why);

/// As much of the shape as the arena's slots depend on.
inline Shape slot_shape(const Info& info) {
  Shape shape;
  shape.hidden = info.hidden;
  shape.latent = info.latent;
  shape.top_k = info.top_k;
  return shape;
}

/// Whether the daemon still holds the other end of the lane's socket.
bool lease_held(const moed_lane& lane);

}  // namespace moed
