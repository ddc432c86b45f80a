// Preloaded into a process, it makes its wall clock wrong: a day ahead, and set back and forth by an hour ten times a
// second. The monotonic clock stays as it is.
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr time_t kDay = 86'400, kHour = 3'600;
constexpr long kStep = 100'000'000;  // ns

timespec wrong_time() {
  timespec t{};
  ::syscall(SYS_clock_gettime, CLOCK_REALTIME, &t);
  t.tv_sec += kDay + (t.tv_nsec / kStep % 2 == 0 ? kHour : -kHour);
  return t;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* out) noexcept {
  if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)
    return static_cast<int>(::syscall(SYS_clock_gettime, clock, out));
  *out = wrong_time();
  return 0;
}

int gettimeofday(timeval* out, void* /*zone*/) noexcept {
  const timespec t = wrong_time();
  *out = {t.tv_sec, t.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* out) noexcept {
  const time_t now = wrong_time().tv_sec;
  if (out != nullptr) *out = now;
  return now;
}
}
