// A small HTTP/1.1 server for scrapes and probes: GET and HEAD, bounded in size, time and number of connections.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace boost::asio {
class io_context;
}

namespace moed {

inline constexpr const char* kTypeMetrics = "text/plain; version=0.0.4; charset=utf-8";
inline constexpr const char* kTypeJson = "application/json";
inline constexpr const char* kTypeHtml = "text/html; charset=utf-8";
inline constexpr const char* kTypeText = "text/plain; charset=utf-8";

/// What a handler gives for a path; left alone: there is no such path.
struct HttpAnswer {
  unsigned status = 404;
  std::string body = "not found\n";
  const char* type = kTypeText;
  std::string policy{};  ///< Content-Security-Policy of a page for browsers; empty: none
};

struct HttpOptions {
  std::chrono::milliseconds read_timeout{5000};   ///< from the last answer to the end of a request
  std::chrono::milliseconds write_timeout{5000};  ///< until an answer is taken
  unsigned connections = 64;                      ///< at once; further ones are closed
};

class HttpServer {
 public:
  /// The path of a GET or HEAD request without its query, at most 8 KiB of bytes that the sender chose.
  using Handler = std::function<HttpAnswer(std::string_view path)>;

  /// Listens on "host:port" (an IPv6 host in brackets, port 0: any free one) and serves on `io`, which one thread runs;
  /// both functions are called there. An exception from `handler` becomes an answer with status 500. `on_refused` is
  /// called once for each connection that is closed because it was malformed, too large, too slow or one too many.
  /// Throws std::runtime_error, naming address and reason, when it cannot listen.
  HttpServer(boost::asio::io_context& io, const std::string& listen, Handler handler, std::function<void()> on_refused,
             HttpOptions options = {});
  /// stop(). `io` must outlive this and must not run the handlers any more once what they use is gone.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;
  /// Closes the listener and every connection, on the thread that runs `io`. May be called from any thread, repeatedly.
  void stop();

 private:
  class Listener;
  std::shared_ptr<Listener> listener_;
};

}  // namespace moed
