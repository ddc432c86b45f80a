// moectl bench: latency of host calls through one lane, answers checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/client/moed.h"

namespace moed::ctl {

struct BenchOptions {
  std::string socket;
  std::vector<uint32_t> tokens = {0, 1, 5, 16};
  uint64_t calls = 10'000;  ///< a row of the table, unless seconds is set
  double seconds = 0;       ///< how long a row lasts; 0: calls decides
  uint32_t layer = 0xFFFFFFFFU;
  uint32_t warmup = 100;  ///< calls before those that are counted
  uint32_t spin_us = 1'000'000;
  uint64_t seed = 1;
  int pin_cpu = -1;    ///< -1: not pinned
  int may_lose = -1;   ///< calls that only this rank's loss ends are counted apart; -1: no rank may be lost
  bool check = false;  ///< compare every answer with the first, bit for bit
  bool json = false;
};

/// One row of the table. Times are of the calls that were ok, microseconds.
struct BenchRow {
  uint32_t tokens = 0;
  uint64_t calls = 0;
  double p50_us = 0, p99_us = 0, max_us = 0, tokens_per_s = 0;
  uint64_t not_ok = 0;         ///< ended with another status
  uint64_t checked = 0;        ///< answers compared
  uint64_t wrong = 0;          ///< and found different
  uint64_t lost = 0;           ///< ended by the loss of the rank that may be lost, warm-up included; not in not_ok
  uint64_t ok_after_lost = 0;  ///< were ok after the last of these
};

/// Whether a call ended because `rank` is lost, late or missing, and no other rank.
inline bool lost_only(moed_status status, const moed_reply_t& reply, int rank) {
  if (rank < 0 || rank >= 128) return false;
  uint64_t only[2] = {0, 0};
  only[rank / 64] = uint64_t{1} << (rank % 64);
  const bool names_ranks =
      status == MOED_DEGRADED || status == MOED_NOT_READY || status == MOED_PEER_TIMEOUT || status == MOED_PEER_LOST;
  return names_ranks && reply.ranks[0] == only[0] && reply.ranks[1] == only[1];
}

/// Runs every row and prints the table or JSON; an exit code: 1 when an answer is not ok or wrong.
int run_bench(const BenchOptions& options);

}  // namespace moed::ctl
