/* moed.h as a C99 program sees it: this file is compiled as C and linked into client_test. */
#include "daemon/client/moed.h"

#include <stddef.h>

typedef char call_is_128_bytes[sizeof(moed_call_t) == 128 ? 1 : -1];
typedef char reply_is_128_bytes[sizeof(moed_reply_t) == 128 ? 1 : -1];
typedef char info_is_128_bytes[sizeof(moed_info) == 128 ? 1 : -1];
typedef char options_are_48_bytes[sizeof(moed_options) == 48 ? 1 : -1];
typedef char total_ns_is_at_64[offsetof(moed_reply_t, total_ns) == 64 ? 1 : -1];

moed_status attach_from_c(const char* path, moed_lane** lane);

moed_status attach_from_c(const char* path, moed_lane** lane) {
  moed_options options = {sizeof options, 0, 0, 0, 0, 0, NULL, NULL};
  return moed_attach(path, &options, lane);
}
