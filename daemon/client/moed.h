/* libmoed: how an engine hands tokens to a moed daemon of the same host and gets the combined result back.
 *
 *   moed_options options = {sizeof options};
 *   moed_lane* lane;
 *   if (moed_attach(NULL, &options, &lane) != MOED_OK) fail(moed_last_error(NULL));
 *   moed_call_t call;
 *   moed_slot(lane, 0, &call);                      offsets of x, ids, weights, out in the lane's arena
 *   call.layer = 1, call.tokens = 8, call.flags = MOED_FLAG_NO_NORM;
 *   ... write x, ids and weights at moed_arena(lane) + their offsets ...
 *   moed_reply_t reply;
 *   if (moed_call(lane, &call, &reply) != MOED_OK) fail(moed_last_error(lane));
 *   ... read out at moed_arena(lane) + call.out ...
 *   moed_detach(lane);
 *
 * Threads: a lane is used by one thread at a time; different lanes are independent. An engine that wants two calls in
 * flight attaches twice. No function blocks without a limit, aborts, prints or installs a signal handler; how long one
 * may block is said with it, and those that say nothing do not block.
 * The lane is held by a socket: when the process ends, however it ends, the daemon frees the lane. A child made by fork
 * without exec keeps that socket open and must not use the lane.
 *
 * L, H, K and E below are latent, hidden, top_k and experts of moed_info; T is the call's number of tokens. All memory
 * is little-endian. */
#ifndef MOED_H
#define MOED_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MOED_API __attribute__((visibility("default")))
#else
#define MOED_API
#endif

#define MOED_ABI 1
#define MOED_LAYER_IDENTITY 0xFFFFFFFFu

/* What became of a call or of a function. The numbers never change. From MOED_BAD_CALL on, except MOED_BUSY, a call's
 * out is zeros; after MOED_DAEMON_LOST and MOED_DEVICE_LOST it is undefined. A daemon may know more statuses than this
 * header: any other number is a failure. */
typedef uint32_t moed_status;
enum {
  MOED_OK = 0,
  MOED_PENDING = 1,      /* not ended yet: only from moed_poll, moed_wait and moed_call */
  MOED_DEGRADED = 2,     /* ended; contributions of lost ranks are left out (reply: ranks, dropped) */
  MOED_MASKED = 3,       /* ended; some ids were counted as -1 (reply: token, slot, value of the first) */
  MOED_DRY = 4,          /* the lane is dry: the call was checked, out is zeros */
  MOED_BAD_CALL = 5,     /* a field or an argument is beyond a limit (reply: field, value, limit) */
  MOED_BAD_ROUTE = 6,    /* an expert id outside [-1, E) (reply: token, slot, value) */
  MOED_BUSY = 7,         /* the lane has a call in flight; at attach: no lane is free */
  MOED_NOT_READY = 8,    /* the world is forming (reply: the ranks never seen yet) */
  MOED_PEER_TIMEOUT = 9, /* the deadline passed (reply: the late ranks) */
  MOED_PEER_LOST = 10,   /* a needed rank is lost (reply: the lost ranks) */
  MOED_STEP_FAILED = 11, /* an earlier call of this step failed (stream calls) */
  MOED_DRAINING = 12,    /* this daemon is leaving */
  MOED_DAEMON_LOST = 13, /* the daemon cannot be reached or is gone: moed_reattach, or attach again */
  MOED_DEVICE_LOST = 14, /* the daemon's GPU context failed; it is ending */
  MOED_VERSION = 15,     /* daemon and libmoed are of versions that do not go together */
  MOED_DENIED = 16,      /* the daemon belongs to another user */
  MOED_UNSUPPORTED = 17, /* this daemon or this libmoed cannot do it, e.g. stream calls to a CPU daemon */
  MOED_NO_MEMORY = 18,   /* the arena asked for does not fit, or this process has no memory or descriptors left */
  MOED_INTERNAL = 19     /* a bug; the daemon's log says more */
};

enum { MOED_KIND_ROUTED = 0, MOED_KIND_LAYER = 1 };

/* Bits of moed_call_t.flags. */
enum {
  MOED_FLAG_NO_NORM = 1,   /* out is the sum over the experts, not normalised */
  MOED_FLAG_IDS64 = 2,     /* ids are int64, else int32 */
  MOED_FLAG_WEIGHTS16 = 4, /* weights are BF16, else float32 */
  MOED_FLAG_WIRE = 8,      /* x is quantised already: E4M3 codes, and scales holds the E8M0 bytes */
  MOED_FLAG_MASK = 16      /* an id outside [-1, E) counts as -1 instead of ending the call */
};

/* One lane: one engine's place at one daemon. Opaque. */
typedef struct moed_lane moed_lane;

/* What an engine asks for at attach. Zero every field that is not set: 0 is each field's default. */
typedef struct {
  uint32_t size;               /* sizeof(moed_options); a size below 48 is refused, and so are fields, not 0, that this
                                  libmoed does not know */
  uint32_t arena;              /* 0 host memory, 1 GPU memory (MOED_UNSUPPORTED without a CUDA daemon) */
  uint64_t arena_bytes;        /* 0: what the daemon allows (its limits.arena_mb) */
  int32_t device;              /* CUDA ordinal of the engine, for arena 1 */
  uint32_t spin_us;            /* how long moed_wait spins before it sleeps, microseconds; 0: 50; at most 1,000,000 */
  uint32_t dry;                /* 1: the lane starts dry, see moed_dry */
  const uint8_t* model_digest; /* 32 bytes: refuse a daemon that serves another model; NULL: any */
  const char* name;            /* shown by moectl status, up to 32 bytes; NULL: none */
} moed_options;

/* What a lane's daemon is and allows. */
typedef struct {
  uint32_t size;         /* bytes filled; the caller sets it to sizeof(moed_info) before moed_get_info */
  uint32_t abi;          /* MOED_ABI of the daemon */
  uint32_t protocol;     /* between daemons */
  uint32_t numerics;     /* daemons of equal numerics give equal bits on equal hardware */
  uint32_t rank, ranks;  /* this daemon, and how many there are */
  uint32_t lane;         /* this lane's number at its daemon, from 1 */
  uint32_t hidden;       /* H, width of x and out of MOED_KIND_LAYER, elements */
  uint32_t latent;       /* L, width of x and out of MOED_KIND_ROUTED, elements */
  uint32_t intermediate; /* width inside an expert */
  uint32_t experts;      /* E, routed experts of a layer over all ranks */
  uint32_t top_k;        /* K, slots of a token */
  uint32_t first_layer;  /* layers served: [first_layer, first_layer + layers) */
  uint32_t layers;
  uint32_t max_tokens;      /* more tokens than this are served in pieces */
  uint32_t max_call_tokens; /* more tokens than this are refused */
  uint32_t backend;         /* 0 CPU, 1 CUDA */
  uint32_t sharing;         /* of the GPU; 0 for a CPU daemon */
  uint32_t slots;           /* slots of the arena, see moed_slot */
  uint32_t slot_tokens;     /* tokens that fit into one slot */
  uint64_t incarnation;     /* this life of the daemon */
  uint64_t arena_bytes;
  uint8_t model_digest[32]; /* SHA-256 */
} moed_info;

/* One layer for T tokens. Offsets are bytes from moed_arena, multiples of 16; the arrays may lie anywhere in the arena.
 * x, scales, ids, weights and valid must not change, and out must not be read, while the call is in flight. */
typedef struct moed_call_ {
  uint32_t kind;    /* MOED_KIND_ROUTED: x is the latent [T, L]; MOED_KIND_LAYER: x is the hidden state [T, H] */
  uint32_t layer;   /* the model's own number, or MOED_LAYER_IDENTITY: out is x times the sum of its weights */
  uint32_t tokens;  /* T, 0 to max_call_tokens */
  uint32_t flags;   /* MOED_FLAG_ bits */
  uint64_t x;       /* BF16 [T, L or H]; with MOED_FLAG_WIRE E4M3 [T, L] */
  uint64_t scales;  /* E8M0 bytes [T, L / 32], read only with MOED_FLAG_WIRE */
  uint64_t ids;     /* int32 or int64 [T, K]; -1: no expert */
  uint64_t weights; /* float32 or BF16 [T, K] */
  uint64_t out;     /* BF16, shaped as x */
  uint64_t valid;   /* 0: none. Else where an int32 lies, read when the call starts and clamped to [0, T]: tokens from
                       there on are padding, send nothing and get zeros */
  uint32_t timeout_us;   /* microseconds from when the daemon sees the call; 0: the daemon's own; at most 60,000,000 */
  uint32_t reserved[15]; /* 0 */
} moed_call_t;

/* How a call ended. Fields that a status does not name are 0. */
typedef struct moed_reply_ {
  uint64_t number; /* of this attach's calls, from 1 */
  uint32_t status; /* moed_status */
  uint32_t layer;
  uint64_t ranks[2]; /* bit r % 64 of ranks[r / 64]: rank r is late, lost or missing */
  uint32_t token;    /* MOED_BAD_ROUTE, MOED_MASKED: where */
  uint32_t slot;
  uint32_t field;    /* MOED_BAD_CALL: index of the field in moed_call_t, kind being 0 */
  uint32_t dropped;  /* MOED_DEGRADED: contributions of a rank to a token that were left out */
  int64_t value;     /* the offending value */
  uint64_t limit;    /* and what it had to stay below or at */
  uint64_t total_ns; /* nanoseconds from when the daemon saw the call to its end */
  uint32_t reserved[14];
} moed_reply_t;

/* MOED_ABI of this libmoed. */
MOED_API uint32_t moed_abi(void);

/* Takes a lane of the daemon that listens on `socket` (NULL: $MOED_SOCKET, else the only /run/moed/GROUP/RANK.sock) and
 * stores it in *out; NULL there unless MOED_OK. options NULL: all defaults. Blocks at most 5 s.
 * MOED_DAEMON_LOST: nobody listens, answers or stays; MOED_BUSY: no lane is free; MOED_VERSION, MOED_DENIED,
 * MOED_NO_MEMORY, MOED_BAD_CALL (an option or the path), MOED_UNSUPPORTED. moed_last_error(NULL) has the sentence. */
MOED_API moed_status moed_attach(const char* socket, const moed_options* options, moed_lane** out);

/* Fills *out with at most out->size bytes (0: 128, the first version's) and sets out->size to what was filled.
 * MOED_BAD_CALL: a size below 128. */
MOED_API moed_status moed_get_info(const moed_lane* lane, moed_info* out);

/* The arena's address in this process, until moed_detach; moed_reattach keeps it. The memory is zero at first. */
MOED_API void* moed_arena(const moed_lane* lane);

/* Offsets of slot `slot` of the arena: x, scales, ids (room for int64), weights, out and valid, each 256-byte aligned,
 * for slot_tokens tokens of width H; every other field is 0. The slot's valid word holds INT32_MAX after attach, so
 * that all tokens count until the engine stores a number there. MOED_BAD_CALL: slot is not below moed_info.slots. */
MOED_API moed_status moed_slot(const moed_lane* lane, uint32_t slot, moed_call_t* out);

/* Hands a call over. MOED_OK: it is in flight; MOED_BUSY: the last one still is; MOED_DAEMON_LOST. What is wrong with
 * the call itself is told by its reply. A reply not yet collected is given up. */
MOED_API moed_status moed_submit(moed_lane* lane, const moed_call_t* call);

/* MOED_PENDING, or the last call's status with the reply in *out (may be NULL). MOED_DAEMON_LOST is noticed within 100
 * ms and stays until moed_reattach. MOED_BAD_CALL: nothing was submitted. */
MOED_API moed_status moed_poll(moed_lane* lane, moed_reply_t* out);

/* As moed_poll, but blocks until the call has ended or for timeout_us microseconds: it spins for moed_options.spin_us,
 * then sleeps. */
MOED_API moed_status moed_wait(moed_lane* lane, moed_reply_t* out, uint32_t timeout_us);

/* moed_submit, then moed_wait for the call's deadline and 100 ms. After MOED_PENDING the call is still in flight:
 * collect it with moed_poll or moed_wait. */
MOED_API moed_status moed_call(moed_lane* lane, const moed_call_t* call, moed_reply_t* out);

/* Calls on a CUDA stream; cuda_stream is a CUstream. Without a CUDA daemon all of them answer MOED_UNSUPPORTED.
 * begin hands the call over and end makes the stream wait for it; enqueue is both; step starts a new step, after which
 * calls no longer end as MOED_STEP_FAILED; all can be captured into a graph. stream_status: the first reply that was
 * not MOED_OK since the last look. */
MOED_API moed_status moed_begin(moed_lane* lane, void* cuda_stream, const moed_call_t* call);
MOED_API moed_status moed_end(moed_lane* lane, void* cuda_stream);
MOED_API moed_status moed_enqueue(moed_lane* lane, void* cuda_stream, const moed_call_t* call);
MOED_API moed_status moed_step(moed_lane* lane, void* cuda_stream);
MOED_API moed_status moed_stream_status(moed_lane* lane, moed_reply_t* out);

/* Makes the lane dry (on not 0) or not: calls of a dry lane are checked and end at once as MOED_DRY with zeros. Blocks
 * at most 5 s; MOED_PEER_TIMEOUT: no answer by then. */
MOED_API moed_status moed_dry(moed_lane* lane, int on);

/* After MOED_DAEMON_LOST: takes a lane of the daemon that now listens on the same path, with the same options, and maps
 * its arena at the same address. The arena's contents are gone: zeros, as after attach. Blocks at most 5 s; on failure
 * the lane stays lost and the call may be repeated. MOED_BUSY: the lane's daemon is still there; MOED_UNSUPPORTED: the
 * new daemon's model, shape or arena differs, so offsets would mean something else: detach and attach. */
MOED_API moed_status moed_reattach(moed_lane* lane);

/* The status as logs spell it, such as "peer_timeout"; "unknown" for a number that is none. Never NULL. */
MOED_API const char* moed_status_name(moed_status status);

/* One sentence on the lane's last failure, with value, limit and remedy; NULL: on this thread's last moed_attach. Never
 * NULL; valid until the next failure. Failures of calls are described from their reply. */
MOED_API const char* moed_last_error(const moed_lane* lane);

/* Gives the lane back, unmaps its memory and frees it; a call in flight is given up. NULL: nothing happens. */
MOED_API void moed_detach(moed_lane* lane);

#ifdef __cplusplus
}
#endif
#endif
