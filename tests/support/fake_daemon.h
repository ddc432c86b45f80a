// A daemon in the test's own process that plays scripts: what libmoed is tested against.
#pragma once

#include <gtest/gtest.h>
#include <sys/un.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/abi/attach.h"
#include "daemon/abi/mailbox.h"
#include "daemon/client/connect.h"
#include "daemon/client/moed.h"

namespace moed::fake {

inline constexpr uint64_t kArena = 64 * 1024;
inline constexpr Nanos kSecond = 1'000'000'000U;

class Directory {
 public:
  Directory() {
    char name[] = "/tmp/moed-client-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// What one attach of the scripted daemon gives; a test changes it before the engine attaches.
struct Offer {
  Attached answer;
  Fd mailbox_fd = make_sealed_memory("mailbox", sizeof(HostMailbox));
  Fd arena_fd = make_sealed_memory("arena", kArena);
  Mapping mailbox{mailbox_fd, sizeof(HostMailbox)};
  std::size_t bytes = sizeof(Attached);
  std::size_t descriptors = 2;

  Offer() {
    Info& i = answer.info;
    i.size = sizeof i;
    i.abi = kAbi;
    i.ranks = 1;
    i.lane = 1;
    i.hidden = 256;
    i.latent = 128;
    i.experts = 8;
    i.top_k = 2;
    i.slots = 2;
    i.slot_tokens = 20;
    i.incarnation = 77;
    i.arena_bytes = kArena;
    answer.descriptors = 2;
    answer.deadline_ms = answer.first_deadline_ms = 3000;
    auto& h = box().header;
    h.magic = kMailboxMagic;
    h.abi = kAbi;
    h.bytes = sizeof(HostMailbox);
    h.arena_bytes = kArena;
    h.incarnation.store(77);
  }
  HostMailbox& box() const { return *reinterpret_cast<HostMailbox*>(mailbox.data()); }
};

/// A daemon that accepts one engine after the other and gives each connection to the next script.
class FakeDaemon {
 public:
  using Script = std::function<void(const Fd& connection)>;

  explicit FakeDaemon(std::vector<Script> scripts) : path_(directory_ / "0.sock") {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path_.c_str());
    listener_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener_.get(), 4), 0);
    thread_ = std::thread([this, all = std::move(scripts)] {
      for (const Script& script : all) {
        if (!wait_socket(listener_, POLLIN, now_ns() + 4 * kSecond)) return;
        const Fd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        script(connection);
      }
    });
  }
  ~FakeDaemon() { thread_.join(); }
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;
  const char* path() const { return path_.c_str(); }

 private:
  Directory directory_;
  std::string path_;
  Fd listener_;
  std::thread thread_;
};

/// Waits for one message; its length, 0 when the engine has left.
template <class T>
ssize_t receive(const Fd& connection, T& message) {
  std::vector<Fd> fds;
  return receive_message(connection.get(), {reinterpret_cast<std::byte*>(&message), sizeof message}, fds);
}

/// Receives Attach and answers with the offer.
inline Attach give(const Fd& connection, const Offer& offer) {
  Attach request;
  EXPECT_EQ(receive(connection, request), static_cast<ssize_t>(sizeof request));
  const int fds[] = {offer.mailbox_fd.get(), offer.arena_fd.get()};
  send_message(connection.get(), &offer.answer, offer.bytes, {fds, offer.descriptors});
  return request;
}

/// Blocks until the engine hangs up.
inline void until_left(const Fd& connection) {
  std::byte nothing{};
  while (receive(connection, nothing) > 0) {
  }
}

inline bool wait_for(const std::function<bool()>& condition) {
  const Nanos until = now_ns() + 4 * kSecond;
  while (!condition() && now_ns() < until) std::this_thread::yield();
  return condition();
}

inline void answer_call(HostMailbox& box, uint64_t number, Status status) {
  box.reply = {};
  box.reply.number = number;
  box.reply.status = static_cast<uint32_t>(status);
  box.reply.layer = box.call.layer;
  box.done.store(number);
  if (box.done_asleep.load() != 0) futex_wake(futex_address(box.done));
}

struct Engine {
  moed_lane* lane = nullptr;
  moed_status status;
  explicit Engine(const char* path, const moed_options* options = nullptr)
      : status(moed_attach(path, options, &lane)) {}
  ~Engine() { moed_detach(lane); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
};

inline bool says(const char* sentence, const char* part) {
  return std::string(sentence).find(part) != std::string::npos;
}

}  // namespace moed::fake
