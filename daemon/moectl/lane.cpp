// What moectl's commands share.
#include "daemon/moectl/lane.h"

#include <cstdio>

#include "daemon/abi/arena.h"
#include "daemon/abi/call.h"

namespace moed::ctl {
namespace {

std::string rank_list(const uint64_t (&ranks)[2]) {
  std::string list;
  for (uint32_t r = 0; r < 128; ++r)
    if ((ranks[r / 64] >> (r % 64) & 1) != 0) list += (list.empty() ? "" : ",") + std::to_string(r);
  return list.empty() ? "none" : list;
}

}  // namespace

Exit exit_of(moed_status status) {
  if (status == MOED_DAEMON_LOST) return kUnreachable;
  return status < MOED_BAD_CALL && status != MOED_PENDING ? kDone : kNo;
}

Exit attach(const std::string& socket, const moed_options& options, Lane& out) {
  moed_lane* handle = nullptr;
  const moed_status status = moed_attach(socket.empty() ? nullptr : socket.c_str(), &options, &handle);
  if (status != MOED_OK) {
    std::fprintf(stderr, "moectl: %s: %s\n", moed_status_name(status), moed_last_error(nullptr));
    return exit_of(status);
  }
  out.handle.reset(handle);
  out.info.size = sizeof out.info;
  const moed_status known = moed_get_info(handle, &out.info);
  out.arena = static_cast<std::byte*>(moed_arena(handle));
  return exit_of(known);
}

uint32_t width_of(const moed_info& info, uint32_t kind) { return kind == MOED_KIND_LAYER ? info.hidden : info.latent; }

ArrayBytes bytes_of(const moed_info& info, const moed_call_t& call) {
  const uint64_t elements = uint64_t{call.tokens} * width_of(info, call.kind);
  const uint64_t slots = uint64_t{call.tokens} * info.top_k;
  const bool wire = (call.flags & MOED_FLAG_WIRE) != 0;
  return {wire ? elements : elements * 2, wire ? elements / kBlock : 0,
          slots * ((call.flags & MOED_FLAG_IDS64) != 0 ? 8 : 4),
          slots * ((call.flags & MOED_FLAG_WEIGHTS16) != 0 ? 2 : 4), elements * 2};
}

bool place(const Lane& lane, moed_call_t& call) {
  const ArrayBytes bytes = bytes_of(lane.info, call);
  moed_call_t slot;
  // A slot is as wide as hidden, and latent may be wider.
  if (moed_slot(lane.handle.get(), 0, &slot) == MOED_OK && call.tokens <= lane.info.slot_tokens &&
      slot.out + bytes.out <= slot.valid && slot.x + bytes.x <= slot.scales && slot.scales + bytes.scales <= slot.ids) {
    call.x = slot.x, call.scales = slot.scales, call.ids = slot.ids, call.weights = slot.weights;
    call.out = slot.out, call.valid = slot.valid;
    return true;
  }
  uint64_t end = 0;
  auto take = [&end](uint64_t size) {
    const uint64_t start = end;
    end += round_up(size, 256);
    return start;
  };
  call.x = take(bytes.x);
  call.scales = take(bytes.scales);
  call.ids = take(bytes.ids);
  call.weights = take(bytes.weights);
  call.out = take(bytes.out);
  call.valid = take(4);
  if (call.valid == 0) call.valid = take(4);  // 0 means that there is none
  if (end <= lane.info.arena_bytes) return true;
  std::fprintf(
      stderr, "moectl: %u tokens need an arena of %llu bytes, this one has %llu: raise limits.arena_mb of the daemon\n",
      call.tokens, static_cast<unsigned long long>(end), static_cast<unsigned long long>(lane.info.arena_bytes));
  return false;
}

std::string layer_name(uint32_t layer) { return layer == MOED_LAYER_IDENTITY ? "identity" : std::to_string(layer); }

std::string describe(const Lane& lane, const moed_call_t& call, moed_status status, const moed_reply_t& reply) {
  std::string line = std::string(moed_status_name(status)) + "  rank " + std::to_string(lane.info.rank) + "  layer " +
                     layer_name(call.layer) + "  tokens " + std::to_string(call.tokens);
  auto add = [&line](const char* what, const std::string& value) { line += std::string("  ") + what + " " + value; };
  switch (status) {
    case MOED_OK:
    case MOED_DRY:
      break;
    case MOED_BAD_CALL:
      add("field", name(static_cast<CallField>(reply.field)));
      add("value", std::to_string(reply.value));
      add("limit", std::to_string(reply.limit));
      break;
    case MOED_MASKED:
    case MOED_BAD_ROUTE:
      add("token", std::to_string(reply.token));
      add("slot", std::to_string(reply.slot));
      add("id", std::to_string(reply.value));
      add("limit", std::to_string(lane.info.experts - 1));
      break;
    case MOED_DEGRADED:
      add("dropped", std::to_string(reply.dropped));
      [[fallthrough]];
    case MOED_NOT_READY:
    case MOED_PEER_TIMEOUT:
    case MOED_PEER_LOST:
      add("ranks", rank_list(reply.ranks));
      break;
    default:
      line += std::string("  ") + moed_last_error(lane.handle.get());
  }
  if (status < MOED_BAD_CALL && status != MOED_PENDING) line += "  " + std::to_string(reply.total_ns / 1000) + " us";
  return line;
}

}  // namespace moed::ctl
