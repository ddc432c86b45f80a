// What host and GPU share: the constants of a back end, the state of its passes in GPU memory, and the board in host
// memory on which the GPU writes what has ended. Passes are chains of kernels; each kernel reads what the one before it
// left here, so nothing but constants goes in by argument.
#pragma once

#include <cstddef>
#include <cstdint>

#include "daemon/abi/mailbox.h"
#include "daemon/abi/record.h"
#include "kernels/backend.h"
#include "kernels/heap.h"
#include "kernels/steps.h"

namespace moed::cuda {

/// One end of a link as passes see it.
struct DeviceLink {
  std::byte* mine;    ///< what that rank writes here
  std::byte* theirs;  ///< what we write there
  uint32_t* bell;     ///< word of that rank's doorbell that its sources add to; nullptr: it has none
  uint32_t session;
  LinkState state;
  uint32_t seen;  ///< was ready once
  uint32_t pad;
};

/// An immutable picture of all links. A pass keeps the one that it began with; the host writes a new one beside it and
/// then the word that says which is present.
struct Picture {
  DeviceLink link[kMaxRanks];
};
inline constexpr uint32_t kPictures = 32;

/// One layer's weights. experts: nullptr: identity; else this rank's, expert_bytes() each, in the order of
/// ExpertOffsets. norm: BF16 [L]; nullptr: 1.
struct DeviceLayer {
  const uint8_t* experts;
  const uint16_t* norm;
};

/// Where an expert's six tensors lie in its block.
struct ExpertOffsets {
  uint64_t w1, w1_scale, w3, w3_scale, w2, w2_scale;
};
MOED_HD constexpr ExpertOffsets expert_offsets(const Shape& s) {
  const uint64_t packed = uint64_t{s.intermediate} * s.latent / 2;
  const uint64_t scales = uint64_t{s.intermediate} * s.latent / kBlock;
  return {0, packed, packed + scales, 2 * packed + scales, 2 * (packed + scales), 3 * packed + 2 * scales};
}

/// A call as the gate finds it: by the host for host calls, by registration for stream calls. Its fields are checked.
struct DeviceCall {
  Call call;
  uint64_t number;
  uint64_t timeout_ns;
  Status forced;      ///< not ok: ends at once with this
  uint32_t dry;       ///< checked, then ends
  uint32_t may_zero;  ///< out lies within the arena
  uint32_t plain;     ///< nothing speaks against ending it within a call loop
};
static_assert(sizeof(DeviceCall) % 16 == 0);

/// Records of stream calls, 1 to kMostRecords of a lane: what a bell may name.
inline constexpr uint32_t kMostRecords = 4096;
inline constexpr uint32_t kHostBell = 0x40000000U;  ///< bell: the host's own record, beside those of stream calls

/// What the kernels of a pass have to do.
enum class Mode : uint32_t {
  none,    ///< nothing has come
  start,   ///< a new call: copy and check its routing
  piece,   ///< dispatch the next piece
  again,   ///< dispatch what a call loop may have dispatched in part
  wait,    ///< go on waiting for one that an earlier pass dispatched
  reduce,  ///< all that will answer have answered
  fail,    ///< zeros, and the end
};

/// The state of one lane's call pass.
struct LaneState {
  // By the host, while nothing is armed:
  DeviceMailbox* mailbox;
  std::byte* arena;
  uint64_t arena_bytes;
  // By the host at any time:
  alignas(128) uint32_t disarm;
  DeviceCall host_call;
  uint32_t host_number;  ///< low half of host_call's number, written after it
  // By the passes:
  alignas(128) DeviceCall now;
  Mode mode;
  uint32_t running;  ///< a call is between its bell and its end
  uint32_t sent;     ///< the present piece is dispatched
  uint32_t picture;
  uint64_t count;          ///< of the lane; goes on over attaches
  uint32_t valid;          ///< tokens that are not padding
  uint32_t done;           ///< tokens of finished pieces
  uint32_t tokens;         ///< of the present piece
  Status ended;            ///< pending: it goes on
  Status good;             ///< what a call that worked ends as
  uint32_t broken;         ///< 1 + the first rank whose partial is not there although its return line is
  uint32_t late;           ///< the reduction of the present piece has been begun before
  WaitFault missing;       ///< that partial
  unsigned long long bad;  ///< first slot with an id out of range; ~0: none
  uint64_t seen, deadline, waited_from, decided;  ///< global_time
  RankSet needed, waiting, in, out, named;
  uint64_t awaited[kMaxRanks];  ///< sequence of the present piece, by rank
  uint32_t working;             ///< not 0: a loop has left a call to the kernels behind it; written by exchanges
  uint32_t arrived;             ///< blocks of call loops that have ended their part of a call, ever
  uint32_t checked;             ///< blocks that have begun to follow, over all call loops
  uint32_t host_taken;          ///< host_number of the host call taken last
  alignas(16) CallRecord record;
  uint32_t bitmap[kMaxRanks][kMaxTokens / 32];  ///< of the present piece: tokens that have a row at that rank
};

/// What the leading block of a call loop tells the others of a call: one line.
struct CallTicket {
  uint32_t kind, layer, tokens, flags;  // as Call has them
  uint64_t x, scales, ids, weights, out, valid_at;
  uint64_t count;           ///< the lane's
  uint32_t valid, picture;  ///< tokens that are no padding
  uint32_t leave;           ///< no call: the loop ends
  uint32_t blocks;          ///< that have begun and share the call's tokens, the leading one too
  uint32_t pad[2];
};
static_assert(offsetof(CallTicket, count) == offsetof(Call, valid) + 8);
static_assert(sizeof(CallTicket) <= kLinePayload && sizeof(CallTicket) % 16 == 0);

/// What a call loop, and a serve loop, do at most. Longer ones go through the kernels behind the loop.
inline constexpr uint32_t kLoopTokens = 128, kLoopSlots = 2048;
/// Call lines that a block of a serve loop watches, unless there are more than all blocks watch so.
inline constexpr uint32_t kWatched = 16;

/// What a block of a serve loop has done of a source's rows; 16 bytes, so that they are read as they were written.
struct alignas(16) Mark {
  uint64_t sequence;
  uint32_t rows;  ///< done | 1 << (16 + kMissing, kOvertaken or kBad)
  uint32_t loop;  ///< low half of the loop's number
};

/// What the leading block of a serve loop says to the others.
struct alignas(16) ServeGo {
  uint64_t loop;     ///< number of the loop << 1 | 1: it ends
  uint32_t picture;  ///< the present one
  uint32_t blocks;   ///< that have begun and serve, the leading one not counted
};

/// Which call lines were seen, taken, and are worth lingering for.
struct Watch {
  uint64_t served;    ///< sequence taken last
  uint64_t pending;   ///< sequence seen and not taken; 0: none
  uint64_t since;     ///< end of the last look that did not show it
  uint64_t again;     ///< not to be taken before this time: its rows were incomplete
  uint32_t recent;    ///< passes that it may still miss before nobody lingers for it
  uint32_t retries;   ///< times in a row that its rows were incomplete: not for a serve loop before they were complete
  uint64_t flight;    ///< sequence that a serve loop has under way; 0: none
  uint64_t seen;      ///< global_time of it
  uint32_t rows;      ///< of what is under way
  uint32_t answered;  ///< the present loop has sent a return line
  uint64_t reported;  ///< sequence of which a missing row was reported last
};

/// One call in a serve pass.
struct DeviceSource {
  uint32_t rank, lane;
  uint64_t sequence;
  CallLine call;
  const std::byte* rows_segment;
  std::byte* answer_segment;
  uint64_t queue_ns;
  uint32_t first_row, rows;
  uint32_t status;      ///< Status
  uint32_t incomplete;  ///< 0, or why it is not served in this pass: kMissing, kOvertaken
};
inline constexpr uint32_t kMissing = 1, kOvertaken = 2;  ///< a row did not come; a newer call overwrites it
inline constexpr uint32_t kBad = 3;                      ///< an id of a row is out of range

struct Place {
  uint32_t source, token;
};

/// Pairs of one (layer, local expert): [first, first + count) of Serve::pairs.
struct Group {
  uint32_t layer, expert, first, count;
};

struct RowSlot {
  uint32_t row, slot;
};

/// The state of the serve pass.
struct ServeState {
  uint32_t sources, rows, next;
  uint32_t groups, pairs;
  uint64_t last_look, first_pending;
  uint64_t gather, experts, send;  ///< global_time at which each began
  uint64_t waited;                 ///< ns from the first call line of the pass to gather
  uint64_t chosen;                 ///< loop that chose the sources
  uint32_t working;                ///< not 0: a loop has left sources to the kernels behind it; written by exchanges
  uint32_t checked;                ///< blocks that have begun to follow, over all serve loops
  uint32_t left;                   ///< blocks that have followed and have left their loop, ever
  uint64_t started;                ///< global_time of the first one
  uint64_t records;                ///< of passes that served somebody, so far
};

/// A record as the GPU writes it to the host without a fence: 32 bits of it and the low half of its number in every
/// 64-bit word, so that the host takes it only when it is whole.
template <class Record>
struct Tagged {
  static_assert(sizeof(Record) % 4 == 0);
  static constexpr uint32_t kWords = sizeof(Record) / 4;
  uint64_t word[kWords];
};

/// A wait that ended in vain: who waited, for whom, for what.
struct DeviceFault {
  WaitFault fault;
  uint64_t number;  ///< of the fault, from 1; written last
};

inline constexpr uint32_t kServeRecords = 1024, kFaults = 64;

/// How a call's out becomes visible before its done.
inline constexpr uint32_t kSettleConfirm = 0, kSettleFence = 1, kSettleNone = 2;

/// Host memory that the GPU writes. Every word has one writer.
struct HostLane {
  alignas(128) Tagged<CallRecord> record;  ///< of the call that ended last
  alignas(128) uint64_t done;  ///< calls ended (low half of the lane's count), and the low half of its number
  alignas(128) uint64_t begun, completed;  ///< loops; completed: what a marker said last
  uint64_t handed;                         ///< the last loop that left a call to the kernels behind it
};
struct Board {
  HostLane lane[kMaxLanes + 1];
  Tagged<ServeRecord> served[kServeRecords];  ///< record n, from 1, in slot n % kServeRecords
  alignas(128) uint64_t records;
  alignas(128) uint64_t rung;  ///< of the doorbell, read by the last serve loop before it looked at any call line
  alignas(128) uint64_t begun, completed;  ///< loops; completed: what a marker said last
  uint64_t handed;                         ///< the last serve loop that left something to the kernels behind it
  uint64_t serving, answered;              ///< the last one whose sources they have taken, and whose were answered
  DeviceFault fault[kFaults];
};

/// The constants of a back end, and where everything lies. Passed to every kernel.
struct World {
  Shape shape;
  SegmentLayout layout;
  RowLayout row;
  uint32_t rank, ranks;
  uint32_t first, local;  ///< experts of this rank: [first, first + local)
  uint32_t max_call_tokens;
  uint32_t drop;  ///< on_lost_rank
  uint32_t max_rows, max_pairs;
  uint32_t row_stride;  ///< bytes of a gathered row: whole lines' payload
  double per_latent;    ///< 1 / L
  float per_expert;     ///< 1 / experts
  uint32_t per_slot;    ///< 2^16 / K, rounded up: i / K is i * per_slot >> 16 up to 2^11
  uint64_t linger_ns;
  uint64_t experts_delay_ns, send_delay_ns, call_delay_ns;
  uint64_t delay_for_ns;  ///< the delays end so long after the first pass; 0: never
  Picture* pictures;
  uint32_t* present;          ///< index of the present picture
  uint32_t* disarm;           ///< not 0: every gate and wait ends
  uint64_t* faults;           ///< counted on the device
  LaneState* lane;            ///< [lanes_all]
  int32_t* ids;               ///< [lanes_all, max_call_tokens, K], private and checked
  float* weights;             ///< the same
  const DeviceLayer* layers;  ///< [layers]
  uint32_t model_layers;      ///< entries of it; the others are identity
  Board* board;
  const uint32_t* doorbell;  ///< of this rank: the word that sources add to
  uint64_t* begun;           ///< [lanes_all + 1] loops begun: of each lane, and of serving
  // Loops
  uint32_t call_blocks, serve_blocks;
  uint32_t long_way;  ///< drills are configured, or it is asked for: nothing ends within a loop
  uint32_t settle;    ///< how out becomes visible before done
  DeviceCall* calls;  ///< [lanes_all, kMostRecords]
  Line* call_ticket;  ///< [lanes_all]
  ServeGo* serve_go;
  Mark* mark;  ///< [ranks, lanes_all, blocks that share a source]
  // Serve pass
  ServeState* serve;
  Watch* watch;           ///< [ranks, lanes_all]
  DeviceSource* source;   ///< as many
  Place* place;           ///< [max_rows]
  uint8_t* gathered;      ///< [max_rows, row_stride]: ids, weights, scales, codes
  uint32_t* key_count;    ///< [layers * local], zeros between passes
  uint32_t* key_first;    ///< the same
  uint32_t* pair_key;     ///< [max_rows, K]
  uint32_t* pair_rank;    ///< [max_rows, K]: place within its key
  uint32_t* pair_of;      ///< [max_rows, K]: index into pair, kNoPair
  RowSlot* pair;          ///< [max_pairs]
  Group* group;           ///< [max_pairs]
  uint8_t* middle;        ///< [max_pairs, I]: E4M3 codes of the intermediate
  uint8_t* middle_scale;  ///< [max_pairs, I / 32]
  float* product;         ///< [max_pairs, L], not yet weighted
};

}  // namespace moed::cuda
