// The peers' rows of the wait matrix: what heartbeats tell adds up, whoever's link it is, and outlives the link.
#include "control/peer_view.h"

#include <gtest/gtest.h>

#include <utility>

#include <boost/asio/io_context.hpp>

#include "tests/support/net_owner.h"

namespace moed::control {
namespace {

using test::free_peers;
using test::linked;
using test::Owner;
using test::pump_for;
using test::pump_until;

using Row = std::vector<uint64_t>;

TEST(PeerView, ARowIsTheSumOfItsHeartbeats) {
  SharedPeer peer;
  EXPECT_FALSE(peer.row(3).beat.has_value());
  EXPECT_TRUE(peer.row(3).wait_us.empty()) << "nothing was told yet, which is not the same as nothing was waited";
  HeartbeatBody beat;
  beat.wait_us[0] = UINT32_MAX;
  beat.wait_us[2] = 5;
  beat.wait_us[kMaxRanks - 1] = 9;
  peer.add(beat, 100);
  peer.add(beat, 200);
  EXPECT_EQ(peer.row(3).beat, 200U);
  EXPECT_EQ(peer.row(3).wait_us, (Row{2 * uint64_t{UINT32_MAX}, 0, 10}));
  EXPECT_EQ(peer.row(kMaxRanks).wait_us.back(), 18U);
}

TEST(PeerView, RowsComeByHeartbeatAndOutliveTheLink) {
  const auto peers = free_peers(3);
  Owner a(peers, 0);
  {
    Owner b(peers, 1);
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return linked(a, 1) && linked(b, 0); }));
    b.waited_us = 1'000;
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.loop->waits()[1].wait_us == Row(3, 1'000); }));
    b.waited_us = 1'700;
    ASSERT_TRUE(pump_until({&a, &b}, [&] { return a.loop->waits()[1].wait_us == Row(3, 1'700); }));
    pump_for({&a, &b}, std::chrono::milliseconds(300));  // heartbeats that tell of no more waits
    EXPECT_EQ(a.loop->waits()[1].wait_us, Row(3, 1'700));
    EXPECT_FALSE(a.loop->waits()[0].beat.has_value()) << "nobody sends itself heartbeats";
    EXPECT_FALSE(a.loop->waits()[2].beat.has_value()) << "rank 2 was never there";
  }
  ASSERT_TRUE(pump_until({&a}, [&] { return !linked(a, 1); }));
  const Nanos last = *a.loop->waits()[1].beat;
  EXPECT_EQ(a.loop->waits()[1].wait_us, Row(3, 1'700));
  Owner again(peers, 1);  // a new process counts from nothing
  ASSERT_TRUE(pump_until({&a, &again}, [&] { return linked(a, 1) && linked(again, 0); }));
  again.waited_us = 300;  // what was waited for before there was a link, nobody is told
  ASSERT_TRUE(pump_until({&a, &again}, [&] { return a.loop->waits()[1].wait_us == Row(3, 2'000); }));
  EXPECT_GT(*a.loop->waits()[1].beat, last);
}

}  // namespace
}  // namespace moed::control
