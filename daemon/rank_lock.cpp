#include "daemon/rank_lock.h"

#include <sys/file.h>

#include <cstring>
#include <filesystem>

namespace moed {

RankLock::RankLock(const std::string& run_dir, const std::string& group, uint32_t rank) {
  const std::filesystem::path dir = std::filesystem::path(run_dir) / group;
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) throw std::runtime_error("cannot make " + dir.string() + ": " + error.message());
  const std::string path = (dir / (std::to_string(rank) + ".lock")).string();
  file_ = Fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0660));
  if (!file_) throw std::runtime_error("cannot open " + path + ": " + std::strerror(errno));
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    char holder[32] = {};
    if (::pread(file_.get(), holder, sizeof holder - 1, 0) <= 0) holder[0] = '?';
    throw RankHeld("rank " + std::to_string(rank) + " of group " + group + " is held by pid " + holder + " (" + path +
                   ")");
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(file_.get(), 0) != 0 || ::pwrite(file_.get(), pid.data(), pid.size(), 0) < 0)
    throw std::runtime_error("cannot write " + path + ": " + std::strerror(errno));
}

}  // namespace moed
