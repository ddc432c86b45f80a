// Two UCX workers in one process: messages in order both ways, an end that goes is noticed by the other, and garbage on
// the data port disturbs nobody.
#include "control/ucx.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif
#include <sys/socket.h>

#include <utility>

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstring>

#include "daemon/abi/fd.h"

namespace moed::control {
namespace {

using namespace std::chrono_literals;

constexpr const char* kPorts = "7600-8099";

struct Node {
  explicit Node(boost::asio::io_context& io)
      : worker(io,
               {.message =
                    [this](std::span<const uint8_t> header, std::span<const uint8_t> body) {
                      headers.emplace_back(header.begin(), header.end());
                      bodies.emplace_back(body.begin(), body.end());
                    },
                .failed = [this](UcxWorker::Endpoint endpoint, const std::string&) { failed.push_back(endpoint); }},
               kPorts) {}
  std::vector<std::vector<uint8_t>> headers, bodies;
  std::vector<UcxWorker::Endpoint> failed;
  UcxWorker worker;
};

/// Runs `io` until `done` or 5 s have passed.
template <class Done>
bool run_until(boost::asio::io_context& io, Done done) {
  const auto limit = std::chrono::steady_clock::now() + 5s;
  while (!done() && std::chrono::steady_clock::now() < limit) io.run_for(5ms);
  return done();
}

std::vector<uint8_t> numbered(uint32_t number, size_t bytes) {
  std::vector<uint8_t> all(std::max<size_t>(bytes, 4), static_cast<uint8_t>(number));
  std::memcpy(all.data(), &number, sizeof number);
  return all;
}

UcxWorker::Endpoint join(Node& from, const Node& to) {
  std::string why;
  const UcxWorker::Endpoint end = from.worker.connect(to.worker.address(), why);
  EXPECT_NE(end, 0U) << why;
  return end;
}

TEST(Ucx, MessagesArriveWholeAndInOrderBothWays) {
  boost::asio::io_context io;
  Node a(io);
  Node b(io);
  const auto to_b = join(a, b);
  const auto to_a = join(b, a);
  for (uint32_t i = 0; i < 1000; ++i) {
    ASSERT_TRUE(a.worker.send(to_b, numbered(i, 40), numbered(i, i % 3 == 0 ? UcxWorker::kMaxBody : i)));
    ASSERT_TRUE(b.worker.send(to_a, numbered(i, 40), {}));
    ASSERT_TRUE(run_until(io, [&] { return b.bodies.size() + 100 > i && a.bodies.size() + 100 > i; })) << i;
  }
  ASSERT_TRUE(run_until(io, [&] { return b.bodies.size() == 1000 && a.bodies.size() == 1000; })) << b.bodies.size();
  for (uint32_t i = 0; i < 1000; ++i) {
    ASSERT_EQ(b.headers[i], numbered(i, 40));
    ASSERT_EQ(b.bodies[i], numbered(i, i % 3 == 0 ? UcxWorker::kMaxBody : i));
    ASSERT_EQ(a.headers[i], numbered(i, 40));
    ASSERT_TRUE(a.bodies[i].empty());
  }
  EXPECT_FALSE(a.worker.send(to_b, numbered(1, 40), std::vector<uint8_t>(UcxWorker::kMaxBody + 1)));
  EXPECT_FALSE(a.worker.send(to_b + 100, numbered(1, 40), {}));
  EXPECT_TRUE(a.failed.empty() && b.failed.empty());
}

TEST(Ucx, AWorkerEndsAtAnyMomentOfAConnectionInTheMaking) {
#ifdef __SANITIZE_ADDRESS__
  const __lsan::ScopedDisabler begun;  // of some endpoints that UCX has begun then, it leaks 56 bytes each (1.13)
#endif
  for (int turns = 0; turns < 120; ++turns) {
    boost::asio::io_context ours;
    boost::asio::io_context theirs;
    auto a = std::make_unique<Node>(ours);
    Node b(theirs);
    const auto to_a = join(b, *a);
    ASSERT_TRUE(b.worker.send(to_a, numbered(1, 40), {}));
    if (turns % 2 == 1) join(*a, b);
    for (int i = 0; i < turns / 4; ++i) {
      theirs.run_for(200us);
      ours.run_for(200us);
    }
    theirs.run_for(1ms);
    a.reset();  // UCX may be about to answer b, or just have begun to
  }
}

TEST(Ucx, AnEndThatGoesIsNoticedOnce) {
  boost::asio::io_context io;
  Node a(io);
  auto b = std::make_unique<Node>(io);
  const auto to_b = join(a, *b);
  const auto to_a = join(*b, a);
  ASSERT_TRUE(a.worker.send(to_b, numbered(1, 40), {}));
  ASSERT_TRUE(b->worker.send(to_a, numbered(1, 40), {}));
  ASSERT_TRUE(run_until(io, [&] { return a.headers.size() == 1 && b->headers.size() == 1; }));
  b.reset();
  ASSERT_TRUE(run_until(io, [&] { return !a.failed.empty(); }));
  io.run_for(50ms);
  EXPECT_EQ(a.failed, std::vector<UcxWorker::Endpoint>{to_b});
  EXPECT_FALSE(a.worker.send(to_b, numbered(2, 40), {}));
  Node c(io);  // and a successor is served
  const auto to_c = join(a, c);
  ASSERT_TRUE(a.worker.send(to_c, numbered(3, 40), {}));
  EXPECT_TRUE(run_until(io, [&] { return c.headers.size() == 1; }));
}

TEST(Ucx, ClosingIsQuietOnBothSides) {
  boost::asio::io_context io;
  Node a(io);
  Node b(io);
  const auto to_b = join(a, b);
  const auto to_a = join(b, a);
  ASSERT_TRUE(a.worker.send(to_b, numbered(1, 40), {}));
  ASSERT_TRUE(b.worker.send(to_a, numbered(1, 40), {}));
  ASSERT_TRUE(run_until(io, [&] { return a.headers.size() == 1 && b.headers.size() == 1; }));
  a.worker.close(to_b);
  a.worker.close(to_b);  // twice is once
  EXPECT_FALSE(a.worker.send(to_b, numbered(2, 40), {}));
  ASSERT_TRUE(b.worker.send(to_a, numbered(2, 40), {}));
  EXPECT_TRUE(run_until(io, [&] { return a.headers.size() == 2; }));
  EXPECT_TRUE(a.failed.empty() && b.failed.empty());
}

TEST(Ucx, GarbageOnTheDataPortDisturbsNobody) {
  boost::asio::io_context io;
  Node a(io);
  Node b(io);
  const auto to_b = join(a, b);
  int reached = 0;
  for (uint16_t port = 7600; port <= 8099; ++port) {  // UCX chooses within the range
    const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) continue;
    ++reached;
    const std::vector<uint8_t> zeros(256, 0);
    EXPECT_EQ(::send(fd.get(), zeros.data(), zeros.size(), MSG_NOSIGNAL), 256);
    io.run_for(20ms);
  }
  EXPECT_GE(reached, 2);
  for (uint32_t i = 0; i < 50; ++i) ASSERT_TRUE(a.worker.send(to_b, numbered(i, 40), {}));
  EXPECT_TRUE(run_until(io, [&] { return b.headers.size() == 50; }));
}

}  // namespace
}  // namespace moed::control
