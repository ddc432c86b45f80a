// What moectl's commands share: exit codes, an attached lane, where a call's arrays lie, and a reply in words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "daemon/client/moed.h"

namespace moed::ctl {

/// interfaces of the command line: what the process ends with.
enum Exit : int { kDone = 0, kNo = 1, kUsage = 2, kUnreachable = 3 };

struct Detach {
  void operator()(moed_lane* lane) const { moed_detach(lane); }
};

/// An attached lane and what its daemon is.
struct Lane {
  std::unique_ptr<moed_lane, Detach> handle;
  moed_info info = {};
  std::byte* arena = nullptr;
};

/// Bytes of a call's arrays.
struct ArrayBytes {
  uint64_t x, scales, ids, weights, out;
};

/// The exit code that a status of a call or an attach stands for. ok, degraded, masked and dry are done.
Exit exit_of(moed_status status);

/// Attaches to `socket` (empty: libmoed's choice); prints why not.
Exit attach(const std::string& socket, const moed_options& options, Lane& out);

/// Width of a row of x and out, in elements.
uint32_t width_of(const moed_info& info, uint32_t kind);

/// Bytes of each array of a call whose kind, tokens and flags are set.
ArrayBytes bytes_of(const moed_info& info, const moed_call_t& call);

/// Sets the call's offsets, valid included: slot 0 when the arrays fit there, else one after the other. False, said on
/// stderr: the arena is too small.
bool place(const Lane& lane, moed_call_t& call);

/// One line on how a call ended: status, rank, layer, tokens, then what the status names or the time.
std::string describe(const Lane& lane, const moed_call_t& call, moed_status status, const moed_reply_t& reply);

/// "identity" or the number.
std::string layer_name(uint32_t layer);

}  // namespace moed::ctl
