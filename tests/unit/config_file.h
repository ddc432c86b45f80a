// For the tests of the configuration: files that are written, loaded and removed.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "daemon/config.h"

namespace moed {

class ConfigFile : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/moed-config-XXXXXX";
    directory_ = ::mkdtemp(name);
    file_ = directory_ + "/c.yaml";
  }
  void TearDown() override {
    ::unlink(file_.c_str());
    ::rmdir(directory_.c_str());
  }
  Config load(const std::string& text, const std::vector<std::string>& sets = {}) {
    ::unlink(file_.c_str());  // some file systems flush a file that is truncated and written again
    std::ofstream(file_, std::ios::binary | std::ios::trunc) << text;
    return load_config(file_, sets);
  }
  /// What load refuses `text` with, the file's directory cut off; "" when it takes it.
  std::string refusal(const std::string& text, const std::vector<std::string>& sets = {}) {
    try {
      load(text, sets);
    } catch (const ConfigError& e) {
      std::string what = e.what();
      if (const auto at = what.find(directory_ + "/"); at == 0) what.erase(0, directory_.size() + 1);
      return what;
    }
    return "";
  }
  std::string directory_, file_;
};

/// What --set `set` over the defaults is refused with; "" when it is taken.
inline std::string set_refusal(const std::string& set) {
  try {
    load_config("", std::vector<std::string>{set});
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

}  // namespace moed
