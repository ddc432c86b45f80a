// Where the programs under test lie: where they were built, or where the environment says, as in a bundle.
#pragma once

#include <cstdlib>
#include <string>

namespace moed::test {

inline std::string moed_binary() {
  const char* path = std::getenv("MOED_BINARY");
  return path != nullptr ? path : MOED_BINARY;
}

}  // namespace moed::test
