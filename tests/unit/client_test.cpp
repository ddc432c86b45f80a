// libmoed's calls, dry lanes and re-attach against a scripted daemon: how each of them ends.
#include "daemon/client/moed.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/fake_daemon.h"

namespace {

using namespace moed::fake;
using moed::Fd;
using moed::HostMailbox;
using moed::Mapping;
using moed::now_ns;

TEST(Call, GoesThereAndBack) {
  Offer offer;
  std::vector<moed::Call> seen;
  {
    FakeDaemon daemon({[&](const Fd& c) {
      give(c, offer);
      for (uint64_t n = 1; n <= 100; ++n) {
        if (!wait_for([&] { return offer.box().bell.load() == n; })) return;
        seen.push_back(offer.box().call);
        answer_call(offer.box(), n, n == 100 ? moed::Status::peer_timeout : moed::Status::ok);
      }
      until_left(c);
    }});
    const Engine engine(daemon.path());
    ASSERT_EQ(engine.status, MOED_OK);
    moed_reply_t reply{};
    EXPECT_EQ(moed_poll(engine.lane, &reply), MOED_BAD_CALL) << "nothing was submitted";
    moed_call_t call{};
    for (uint32_t n = 1; n <= 99; ++n) {
      call.layer = n;
      call.reserved[14] = n;
      ASSERT_EQ(moed_call(engine.lane, &call, &reply), MOED_OK);
      ASSERT_EQ(reply.number, n);
      ASSERT_EQ(reply.layer, n);
    }
    EXPECT_EQ(moed_call(engine.lane, &call, nullptr), MOED_PEER_TIMEOUT);
    EXPECT_EQ(moed_poll(engine.lane, &reply), MOED_PEER_TIMEOUT) << "a reply can be read again";
    EXPECT_EQ(reply.number, 100U);
  }
  ASSERT_EQ(seen.size(), 100U);
  EXPECT_EQ(seen[41].layer, 42U);
  EXPECT_EQ(seen[41].reserved[14], 42U);
}

TEST(Call, BothSidesSleepAndWake) {
  Offer offer;
  std::atomic<bool> engine_slept = false;
  FakeDaemon daemon({[&](const Fd& c) {
    give(c, offer);
    HostMailbox& box = offer.box();
    box.bell_asleep.store(1);
    while (box.bell.load() == 0) moed::futex_wait(moed::futex_address(box.bell), 0, now_ns() + 10 * kSecond);
    box.bell_asleep.store(0);
    engine_slept = wait_for([&] { return box.done_asleep.load() == 1; });
    answer_call(box, 1, moed::Status::ok);
    until_left(c);
  }});
  moed_options options{};
  options.size = sizeof options;
  options.spin_us = 1;
  const Engine engine(daemon.path(), &options);
  ASSERT_EQ(engine.status, MOED_OK);
  std::this_thread::sleep_for(
      std::chrono::milliseconds(20));  // lets the daemon fall asleep; the test holds if it does not
  const moed_call_t call{};
  EXPECT_EQ(moed_call(engine.lane, &call, nullptr), MOED_OK);
  EXPECT_TRUE(engine_slept);
}

TEST(Call, OneInFlightPendingThenCollected) {
  Offer offer;
  std::atomic<bool> go = false;
  FakeDaemon daemon({[&](const Fd& c) {
    give(c, offer);
    wait_for([&] { return go.load(); });
    answer_call(offer.box(), 1, moed::Status::bad_route);
    until_left(c);
  }});
  const Engine engine(daemon.path());
  ASSERT_EQ(engine.status, MOED_OK);
  moed_call_t call{};
  call.timeout_us = 1000;
  moed_reply_t reply{};
  EXPECT_EQ(moed_call(engine.lane, &call, &reply), MOED_PENDING);
  EXPECT_EQ(moed_submit(engine.lane, &call), MOED_BUSY);
  EXPECT_TRUE(says(moed_last_error(engine.lane), "call 1 is in flight"));
  EXPECT_EQ(moed_poll(engine.lane, &reply), MOED_PENDING);
  EXPECT_EQ(moed_wait(engine.lane, &reply, 0), MOED_PENDING);
  go = true;
  EXPECT_EQ(moed_wait(engine.lane, &reply, 3'000'000), MOED_BAD_ROUTE);
  EXPECT_EQ(reply.number, 1U);
  EXPECT_EQ(moed_submit(engine.lane, &call), MOED_OK);
}

TEST(Call, EndsWhenTheDaemonDies) {
  for (const bool spinning : {false, true}) {
    Offer offer;
    FakeDaemon daemon({[&](const Fd& c) {
      give(c, offer);
      wait_for([&] { return offer.box().bell.load() == 1; });
    }});
    moed_options options{};
    options.size = sizeof options;
    options.spin_us = spinning ? 1'000'000 : 1;
    const Engine engine(daemon.path(), &options);
    ASSERT_EQ(engine.status, MOED_OK);
    const moed_call_t call{};
    EXPECT_EQ(moed_call(engine.lane, &call, nullptr), MOED_DAEMON_LOST);
    EXPECT_TRUE(says(moed_last_error(engine.lane), "is gone"));
    EXPECT_EQ(moed_submit(engine.lane, &call), MOED_DAEMON_LOST);
    EXPECT_EQ(moed_poll(engine.lane, nullptr), MOED_DAEMON_LOST);
    EXPECT_EQ(moed_dry(engine.lane, 1), MOED_DAEMON_LOST);
  }
}

TEST(Call, PollingNoticesADeadDaemon) {
  Offer offer;
  FakeDaemon daemon({[&](const Fd& c) { give(c, offer); }});
  const Engine engine(daemon.path());
  ASSERT_EQ(engine.status, MOED_OK);
  const moed_call_t call{};
  ASSERT_EQ(moed_submit(engine.lane, &call), MOED_OK);
  EXPECT_TRUE(wait_for([&] { return moed_poll(engine.lane, nullptr) == MOED_DAEMON_LOST; }));
}

TEST(Call, AnswerBeforeDeathCounts) {
  Offer offer;
  FakeDaemon daemon({[&](const Fd& c) {
    give(c, offer);
    wait_for([&] { return offer.box().bell.load() == 1; });
    answer_call(offer.box(), 1, moed::Status::ok);
  }});
  const Engine engine(daemon.path());
  ASSERT_EQ(engine.status, MOED_OK);
  const moed_call_t call{};
  ASSERT_EQ(moed_submit(engine.lane, &call), MOED_OK);
  std::this_thread::sleep_for(std::chrono::milliseconds(120));  // past the next look at the socket
  EXPECT_EQ(moed_wait(engine.lane, nullptr, 1000), MOED_OK);
}

TEST(Dry, AsksTheDaemon) {
  Offer offer;
  std::vector<uint32_t> asked;
  {
    FakeDaemon daemon({[&](const Fd& c) {
      give(c, offer);
      moed::Dry request;
      while (receive(c, request) == static_cast<ssize_t>(sizeof request)) {
        asked.push_back(request.on);
        moed::Answer answer;
        if (asked.size() == 3) answer.status = MOED_DRAINING, std::strcpy(answer.text, "leaving");
        moed::send_message(c.get(), &answer, sizeof answer);
      }
    }});
    const Engine engine(daemon.path());
    ASSERT_EQ(engine.status, MOED_OK);
    EXPECT_EQ(moed_dry(engine.lane, 7), MOED_OK);
    EXPECT_EQ(moed_dry(engine.lane, 0), MOED_OK);
    EXPECT_EQ(moed_dry(engine.lane, 0), MOED_DRAINING);
    EXPECT_STREQ(moed_last_error(engine.lane), "leaving");
  }
  EXPECT_EQ(asked, (std::vector<uint32_t>{1, 0, 0}));
}

TEST(Reattach, KeepsTheArenaAddress) {
  Offer first;
  Offer other_model;
  other_model.answer.info.model_digest[5] = 1;
  Offer other_size;
  other_size.answer.info.arena_bytes = other_size.box().header.arena_bytes = kArena / 2;
  Offer good;
  moed::Attach again;
  std::atomic<bool> die = false;
  FakeDaemon daemon({[&](const Fd& c) {
                       give(c, first);
                       wait_for([&] { return die.load(); });
                     },
                     [&](const Fd& c) { give(c, other_model), until_left(c); },
                     [&](const Fd& c) { give(c, other_size), until_left(c); },
                     [&](const Fd& c) {
                       again = give(c, good);
                       wait_for([&] { return good.box().bell.load() == 1; });
                       answer_call(good.box(), 1, moed::Status::ok);
                       until_left(c);
                     }});
  moed_options options{};
  options.size = sizeof options;
  options.name = "engine";
  const Engine engine(daemon.path(), &options);
  ASSERT_EQ(engine.status, MOED_OK);
  auto* const arena = static_cast<char*>(moed_arena(engine.lane));
  arena[0] = 'x';
  EXPECT_EQ(moed_reattach(engine.lane), MOED_BUSY);
  die = true;
  moed_call_t call{};
  ASSERT_EQ(moed_call(engine.lane, &call, nullptr), MOED_DAEMON_LOST);
  EXPECT_EQ(moed_reattach(engine.lane), MOED_UNSUPPORTED);
  EXPECT_TRUE(says(moed_last_error(engine.lane), "another model"));
  EXPECT_EQ(moed_reattach(engine.lane), MOED_UNSUPPORTED);
  EXPECT_TRUE(says(moed_last_error(engine.lane), "arena_bytes is 32768, it was 65536"));
  EXPECT_EQ(moed_submit(engine.lane, &call), MOED_DAEMON_LOST) << "still lost";
  ASSERT_EQ(moed_reattach(engine.lane), MOED_OK) << moed_last_error(engine.lane);
  EXPECT_EQ(moed_arena(engine.lane), arena);
  EXPECT_EQ(arena[0], 0);
  arena[0] = 'y';
  const Mapping theirs(good.arena_fd, kArena);
  EXPECT_EQ(static_cast<char>(theirs.data()[0]), 'y');
  moed_reply_t reply{};
  EXPECT_EQ(moed_call(engine.lane, &call, &reply), MOED_OK);
  EXPECT_EQ(reply.number, 1U);
  EXPECT_EQ(again.arena_bytes, kArena);
  EXPECT_STREQ(again.name, "engine");
}

TEST(Abi, StreamCallsAndNullsAnswer) {
  Offer offer;
  FakeDaemon daemon({[&](const Fd& c) { give(c, offer), until_left(c); }});
  const Engine engine(daemon.path());
  ASSERT_EQ(engine.status, MOED_OK);
  const moed_call_t call{};
  EXPECT_EQ(moed_enqueue(engine.lane, nullptr, &call), MOED_UNSUPPORTED);
  EXPECT_STREQ(moed_last_error(engine.lane), "stream calls need a CUDA daemon");
  EXPECT_EQ(moed_begin(engine.lane, nullptr, &call), MOED_UNSUPPORTED);
  EXPECT_EQ(moed_end(engine.lane, nullptr), MOED_UNSUPPORTED);
  EXPECT_EQ(moed_step(engine.lane, nullptr), MOED_UNSUPPORTED);
  EXPECT_EQ(moed_stream_status(engine.lane, nullptr), MOED_UNSUPPORTED);
  EXPECT_EQ(moed_submit(engine.lane, nullptr), MOED_BAD_CALL);
  EXPECT_EQ(moed_call(nullptr, &call, nullptr), MOED_BAD_CALL);
  EXPECT_EQ(moed_wait(nullptr, nullptr, 0), MOED_BAD_CALL);
  EXPECT_EQ(moed_arena(nullptr), nullptr);
  EXPECT_STREQ(moed_status_name(MOED_PEER_TIMEOUT), "peer_timeout");
  EXPECT_STREQ(moed_status_name(4711), "unknown");
  EXPECT_EQ(moed_abi(), 1U);
}

TEST(Detach, ClosesAndUnmaps) {
  auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator{});
  };
  Offer offer;
  const auto before = descriptors();
  {
    FakeDaemon daemon({[&](const Fd& c) { give(c, offer), until_left(c); }});
    const Engine engine(daemon.path());
    ASSERT_EQ(engine.status, MOED_OK);
    EXPECT_GT(descriptors(), before);
  }
  EXPECT_EQ(descriptors(), before);
}

}  // namespace
