// HTTP server: right answers for plain sockets, and hostile or slow clients cost only their own connection.
#include "daemon/http.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <utility>  // Asio 1.74 uses std::exchange without including it

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "daemon/abi/fd.h"

namespace moed {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kLarge = 64 << 20;  // more than the socket buffers of both ends hold

/// A server on a free loopback port and the thread that runs it.
class Server {
 public:
  explicit Server(HttpOptions options = {})
      : http_(
            io_, "127.0.0.1:0", [](std::string_view path) { return answer(path); }, [this] { ++refused; }, options),
        thread_([this] { io_.run(); }) {}
  ~Server() {
    http_.stop();
    thread_.join();  // run() returns when nothing is left to do
  }
  uint16_t port() const { return http_.port(); }
  void stop() { http_.stop(); }

  std::atomic<int> refused{0};

 private:
  static HttpAnswer answer(std::string_view path) {
    if (path == "/metrics") return {200, "moed_ready 1\n", kTypeMetrics};
    if (path == "/livez") return {503, R"({"ok":false,"missing":[]})", kTypeJson};
    if (path == "/large") return {200, std::string(kLarge, 'x'), kTypeText};
    if (path == "/throw") throw std::runtime_error("handler failed");
    if (path == "/throw-int") throw 7;
    return {};
  }

  boost::asio::io_context io_;
  HttpServer http_;
  std::thread thread_;
};

/// A blocking client whose every wait ends after 10 s.
class Client {
 public:
  explicit Client(uint16_t port, int receive_buffer = 0) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval limit{10, 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (receive_buffer > 0) ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0;
  }
  bool connected() const { return connected_; }

  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }

  /// More bytes into the buffer. False: the server has closed (or 10 s have passed: `timed_out`).
  bool more() {
    char chunk[65536];
    const ssize_t n = ::recv(fd_.get(), chunk, sizeof chunk, 0);
    timed_out = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    if (n > 0) buffer_.append(chunk, static_cast<std::size_t>(n));
    return n > 0;
  }

  /// Whether the server closes the connection, whatever it sends before.
  bool closed_by_server() {
    while (more()) {
    }
    return !timed_out;
  }

  struct Response {
    int status = 0;
    std::string head, body;
  };

  /// One response; with_body false: to a HEAD request. Empty when the server closed before it was whole.
  std::optional<Response> receive(bool with_body = true) {
    std::size_t end = 0;
    while ((end = buffer_.find("\r\n\r\n")) == std::string::npos)
      if (!more()) return std::nullopt;
    Response r;
    r.head = buffer_.substr(0, end + 2);
    r.status = std::atoi(r.head.c_str() + std::strlen("HTTP/1.1 "));
    buffer_.erase(0, end + 4);
    const std::size_t at = r.head.find("Content-Length: ");
    if (at == std::string::npos) return std::nullopt;
    const std::size_t length = with_body ? std::strtoul(r.head.c_str() + at + 16, nullptr, 10) : 0;
    while (buffer_.size() < length)
      if (!more()) return std::nullopt;
    r.body = buffer_.substr(0, length);
    buffer_.erase(0, length);
    return r;
  }

  std::optional<Response> ask(const std::string& method, const std::string& target) {
    if (!send(method + " " + target + " HTTP/1.1\r\nHost: x\r\n\r\n")) return std::nullopt;
    return receive(method != "HEAD");
  }

  std::size_t buffered() const { return buffer_.size(); }
  bool timed_out = false;

 private:
  Fd fd_;
  bool connected_ = false;
  std::string buffer_;
};

/// Waits for a counter that another thread moves.
bool reaches(const std::atomic<int>& counter, int wanted) {
  for (int i = 0; i < 5000 && counter.load() != wanted; ++i) std::this_thread::sleep_for(milliseconds(1));
  return counter.load() == wanted;
}

TEST(Http, AnswersOnOneConnection) {
  Server server;
  Client client(server.port());
  auto r = client.ask("GET", "/metrics");
  ASSERT_TRUE(r);
  EXPECT_EQ(r->status, 200);
  EXPECT_EQ(r->body, "moed_ready 1\n");
  EXPECT_NE(r->head.find("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), std::string::npos) << r->head;
  r = client.ask("GET", "/livez?verbose=1");
  ASSERT_TRUE(r);
  EXPECT_EQ(r->status, 503);
  EXPECT_EQ(r->body, R"({"ok":false,"missing":[]})");
  EXPECT_NE(r->head.find("Content-Type: application/json\r\n"), std::string::npos) << r->head;
  r = client.ask("HEAD", "/metrics");
  ASSERT_TRUE(r);
  EXPECT_EQ(r->status, 200);
  EXPECT_NE(r->head.find("Content-Length: 13\r\n"), std::string::npos) << r->head;
  EXPECT_EQ(client.buffered(), 0U);
  for (const char* path : {"/", "/metrics/", "/metricsx", "http://x/metrics", "/%2e%2e/etc/passwd"}) {
    r = client.ask("GET", path);
    ASSERT_TRUE(r) << path;
    EXPECT_EQ(r->status, 404) << path;
  }
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "BREW"}) {
    r = client.ask(method, "/metrics");
    ASSERT_TRUE(r) << method;
    EXPECT_EQ(r->status, 405) << method;
    EXPECT_NE(r->head.find("Allow: GET, HEAD\r\n"), std::string::npos) << r->head;
  }
  for (const char* path : {"/throw", "/throw-int"}) {
    r = client.ask("GET", path);
    ASSERT_TRUE(r);
    EXPECT_EQ(r->status, 500);
    EXPECT_EQ(r->body.find("handler failed"), std::string::npos);
  }
  r = client.ask("GET", "/metrics");
  ASSERT_TRUE(r);
  EXPECT_EQ(r->status, 200);
  EXPECT_EQ(server.refused.load(), 0);
}

TEST(Http, PipelinedRequestsAreAnsweredInOrder) {
  Server server;
  Client client(server.port());
  ASSERT_TRUE(client.send("GET /metrics HTTP/1.1\r\n\r\nHEAD /livez HTTP/1.1\r\n\r\nGET /none HTTP/1.1\r\n\r\n"));
  for (const int status : {200, 503, 404}) {
    const auto r = client.receive(status != 503);
    ASSERT_TRUE(r);
    EXPECT_EQ(r->status, status);
  }
}

TEST(Http, ClosesWhenAskedTo) {
  Server server;
  for (const char* request : {"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n", "GET /metrics HTTP/1.0\r\n\r\n"}) {
    Client client(server.port());
    ASSERT_TRUE(client.send(request));
    const auto r = client.receive();
    ASSERT_TRUE(r);
    EXPECT_EQ(r->body, "moed_ready 1\n");
    EXPECT_TRUE(client.closed_by_server());
  }
  EXPECT_EQ(server.refused.load(), 0);
}

TEST(Http, MalformedRequestsAreClosedAndCounted) {
  Server server;
  const std::string requests[] = {
      std::string("\0\x01\x02\xff garbage \x16\x03\x01", 16) + std::string(300, '\xfe') + "\r\n\r\n",
      "GET\r\n\r\n",
      "GET /metrics HTTP/9.9.9\r\n\r\n",
      "GET /metrics HTTP/1.1\r\nno colon\r\n\r\n",
      "GET /metrics HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
      "GET /metrics HTTP/1.1\r\nContent-Length: 5000000000\r\n\r\n",
      "GET /metrics HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + std::string(2000, 'b'),
      "GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + std::string(2000, 'b') + "\r\n0\r\n\r\n",
      "GET /" + std::string(9000, 'a') + " HTTP/1.1\r\n\r\n",
      "GET /metrics HTTP/1.1\r\nX: " + std::string(1 << 20, 'h') + "\r\n\r\n",
  };
  int expected = 0;
  for (const std::string& request : requests) {
    Client client(server.port());
    ASSERT_TRUE(client.connected());
    client.send(request);  // may fail halfway: the server has closed by then
    EXPECT_TRUE(client.closed_by_server()) << request.substr(0, 60);
    EXPECT_EQ(client.buffered(), 0U) << request.substr(0, 60);
    EXPECT_TRUE(reaches(server.refused, ++expected)) << request.substr(0, 60);
  }
  const auto r = Client(server.port()).ask("GET", "/metrics");
  ASSERT_TRUE(r);
  EXPECT_EQ(r->status, 200);
}

TEST(Http, ARequestWithinTheLimitsPasses) {
  Server server;
  Client client(server.port());
  ASSERT_TRUE(client.send("GET /metrics HTTP/1.1\r\nX: " + std::string(7000, 'h') + "\r\nContent-Length: 1024\r\n\r\n" +
                          std::string(1024, 'b')));
  const auto r = client.receive();
  ASSERT_TRUE(r);
  EXPECT_EQ(r->status, 200);
}

TEST(Http, ASlowSenderIsDropped) {
  HttpOptions options;
  options.read_timeout = milliseconds(200);
  options.write_timeout = std::chrono::hours(1);
  Server server(options);
  Client slow(server.port());
  ASSERT_TRUE(slow.send("GET /metrics HTTP/1.1\r\n"));
  std::atomic<bool> dropped{false};
  std::thread trickle([&] {  // each byte is early enough: only the sum is not
    for (int i = 0; i < 500 && !dropped.load() && slow.send("a"); ++i) std::this_thread::sleep_for(milliseconds(20));
  });
  EXPECT_TRUE(slow.closed_by_server());
  dropped.store(true);
  trickle.join();
  EXPECT_TRUE(reaches(server.refused, 1));

  Client idle(server.port());
  EXPECT_TRUE(idle.closed_by_server());
  EXPECT_EQ(server.refused.load(), 1) << "an idle connection has done nothing wrong";
}

TEST(Http, ASlowReaderIsDropped) {
  HttpOptions options;
  options.read_timeout = std::chrono::hours(1);
  options.write_timeout = milliseconds(200);
  Server server(options);
  Client slow(server.port(), 4096);
  ASSERT_TRUE(slow.send("GET /large HTTP/1.1\r\n\r\n"));
  EXPECT_TRUE(reaches(server.refused, 1));
  EXPECT_TRUE(slow.closed_by_server());
  EXPECT_LT(slow.buffered(), kLarge);
  const auto r = Client(server.port()).ask("GET", "/metrics");
  ASSERT_TRUE(r);
  EXPECT_EQ(r->status, 200);
}

TEST(Http, SurplusConnectionsAreClosed) {
  HttpOptions options;
  options.connections = 3;
  Server server(options);
  {
    std::vector<Client> held;
    for (int i = 0; i < 3; ++i) {
      held.emplace_back(server.port());
      ASSERT_TRUE(held.back().ask("GET", "/metrics"));
    }
    Client surplus(server.port());
    EXPECT_TRUE(surplus.closed_by_server());
    EXPECT_TRUE(reaches(server.refused, 1));
    EXPECT_TRUE(held[0].ask("GET", "/metrics"));
  }
  bool served = false;
  for (int i = 0; i < 1000 && !served; ++i) served = Client(server.port()).ask("GET", "/metrics").has_value();
  EXPECT_TRUE(served) << "closed connections make room";
}

TEST(Http, ParallelScrapers) {
  Server server;
  std::atomic<int> good{0};
  std::vector<std::thread> scrapers;
  for (int i = 0; i < 20; ++i)
    scrapers.emplace_back([&] {
      Client client(server.port());
      for (int n = 0; n < 20; ++n) {
        const auto r = client.ask("GET", "/metrics");
        if (r && r->status == 200 && r->body == "moed_ready 1\n") ++good;
      }
    });
  for (std::thread& t : scrapers) t.join();
  EXPECT_EQ(good.load(), 400);
  EXPECT_EQ(server.refused.load(), 0);
}

TEST(Http, StopsWhileClientsAreConnected) {
  std::vector<Client> clients;
  uint16_t port = 0;
  {
    Server server;
    port = server.port();
    for (int i = 0; i < 5; ++i) clients.emplace_back(port);
    ASSERT_TRUE(clients[0].ask("GET", "/metrics"));
    ASSERT_TRUE(clients[1].send("GET /metr"));
    ASSERT_TRUE(clients[2].send("GET /large HTTP/1.1\r\n\r\n"));
    server.stop();
    server.stop();
    for (Client& client : clients) EXPECT_TRUE(client.closed_by_server());
    EXPECT_EQ(server.refused.load(), 0);
  }
  EXPECT_FALSE(Client(port).connected());
  boost::asio::io_context io;  // the port is free at once, in spite of connections in TIME_WAIT
  const HttpServer next(
      io, "127.0.0.1:" + std::to_string(port), [](std::string_view) { return HttpAnswer{}; }, [] {});
  EXPECT_EQ(next.port(), port);
}

std::string refusal(const std::string& listen) {
  boost::asio::io_context io;
  try {
    const HttpServer server(
        io, listen, [](std::string_view) { return HttpAnswer{}; }, [] {});
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

TEST(Http, SaysWhyItCannotListen) {
  Server server;
  const std::string taken = "127.0.0.1:" + std::to_string(server.port());
  EXPECT_EQ(refusal(taken),
            "http.listen " + taken + ": Address already in use; set another address with --set http.listen=HOST:PORT");
  for (const char* bad :
       {"", "9400", ":9400", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:94x", "192.0.2.1:9400"}) {
    const std::string why = refusal(bad);
    EXPECT_TRUE(why.starts_with("http.listen " + std::string(bad) + ": ")) << why;
  }
  EXPECT_EQ(refusal("localhost:0"), "");
}

}  // namespace
}  // namespace moed
