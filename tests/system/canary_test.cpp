// A bit of one expert's weights flips in a running daemon: every rank's canary reports rank and layer, and no rank of
// that world is ready any more.
#include <gtest/gtest.h>

#include <string>

#include "tests/support/caller.h"
#include "tests/support/daemons.h"
#include "tests/support/scrape.h"

namespace moed {
namespace {

using test::Daemons;
using test::wait_until;

constexpr uint32_t kRanks = 4, kBroken = 2;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kFlipMs = 30'000;  // by then every rank has seen every layer once, whatever else runs here
#else
constexpr int kFlipMs = 8'000;
#endif
/// Two layers, four experts a rank, all of which one token names: two rounds ask for every expert.
const Daemons::Sets kSets = {
    "model.source=synthetic",
    "model.shape={hidden: 128, latent: 128, intermediate: 64, experts: 16, top_k: 4, layers: 2}",
    "http.listen=127.0.0.1:0", "canary.period_ms=400"};

uint16_t http_port(const Daemons& world, uint32_t rank) {
  const std::string log = world[rank].log();
  return static_cast<uint16_t>(std::stoul(log.substr(log.find(" http=") + 6)));
}

TEST(Canary, AFlippedBitMakesTheWorldNotReadyAndIsNamed) {
  const Daemons world(kRanks, kSets, [](uint32_t rank) {
    return rank == kBroken ? Daemons::Sets{"debug.flip_layer=2", "debug.flip_expert=9",
                                           "debug.flip_after_ms=" + std::to_string(kFlipMs)}
                           : Daemons::Sets{};
  });
  for (uint32_t r = 0; r < kRanks; ++r)
    EXPECT_NE(test::get_page(http_port(world, r), "/readyz").find("200"), std::string::npos) << "rank " << r;
  for (uint32_t r = 0; r < kRanks; ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    std::string page;
    const auto not_ready = [&] {
      return (page = test::get_page(http_port(world, r), "/readyz")).find("503") != page.npos;
    };
    EXPECT_TRUE(wait_until(not_ready, kFlipMs + 30'000));
    EXPECT_NE(page.find("canary 2: wrong at layer 2, experts 8 to 11"), std::string::npos) << page;
    const std::string metrics = test::get_page(http_port(world, r), "/metrics");
    EXPECT_GE(test::metric(metrics, R"(moed_canary_total{peer="2",result="wrong"})"), 1);
    EXPECT_EQ(test::metric(metrics, R"(moed_canary_total{peer="1",result="wrong"})"), 0);
    EXPECT_EQ(test::metric(metrics, "moed_ready"), 0);
    const std::string line = R"(error canary: the bits of an answer are wrong peer=2 at="layer 2, experts 8 to 11")";
    const size_t said = world[r].log().find(line);
    EXPECT_NE(said, std::string::npos) << world[r].log();
    EXPECT_EQ(world[r].log().find(line, said + 1), std::string::npos) << "each error once";
  }
}

}  // namespace
}  // namespace moed
