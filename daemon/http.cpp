// The HTTP server. The only file that includes Boost.Beast.
#include "daemon/http.h"

#include <utility>  // Asio 1.74 uses std::exchange without including it

#include <algorithm>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/bind_handler.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <unordered_set>

#include "daemon/log.h"

namespace moed {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;

constexpr uint32_t kMaxHeader = 8 * 1024;
constexpr uint32_t kMaxBody = 1024;
constexpr std::chrono::milliseconds kAcceptPause{100};  // after a failed accept, e.g. when descriptors have run out

[[noreturn]] void cannot_listen(const std::string& listen, const std::string& why) {
  throw std::runtime_error("http.listen " + listen + ": " + why +
                           "; set another address with --set http.listen=HOST:PORT");
}

/// "host:port" or "[v6]:port"; the host may be a name.
tcp::endpoint resolve(asio::io_context& io, const std::string& listen) {
  const std::size_t colon = listen.rfind(':');
  if (colon == std::string::npos || colon == 0) cannot_listen(listen, "not of the form HOST:PORT");
  std::string host = listen.substr(0, colon);
  uint16_t port = 0;
  const char* end = listen.data() + listen.size();
  const auto [at, failed] = std::from_chars(listen.data() + colon + 1, end, port);
  if (failed != std::errc() || at != end) cannot_listen(listen, "the port is not a number from 0 to 65535");
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  error_code error;
  const asio::ip::address address = asio::ip::make_address(host, error);
  if (!error) return {address, port};
  const auto found = tcp::resolver(io).resolve(host, std::to_string(port), tcp::resolver::passive, error);
  if (error) cannot_listen(listen, "the host has no address (" + error.message() + ")");
  return found.begin()->endpoint();
}

}  // namespace

/// Accepts, and holds what all connections share. Sessions keep it alive.
class HttpServer::Listener : public std::enable_shared_from_this<Listener> {
 public:
  Listener(asio::io_context& io, const std::string& listen, Handler handler, std::function<void()> on_refused,
           HttpOptions options)
      : options_(options), handler_(std::move(handler)), on_refused_(std::move(on_refused)), acceptor_(io), pause_(io) {
    const tcp::endpoint endpoint = resolve(io, listen);
    error_code error;
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (!error) port_ = acceptor_.local_endpoint(error).port();
    if (error) cannot_listen(listen, error.message());
  }

  uint16_t port() const { return port_; }
  const HttpOptions& options() const { return options_; }
  void refused() const {
    if (!stopped_) on_refused_();
  }

  void accept() { acceptor_.async_accept(beast::bind_front_handler(&Listener::accepted, shared_from_this())); }

  void stop() {
    asio::dispatch(acceptor_.get_executor(), [self = shared_from_this()] { self->close(); });
  }

  /// The answer to one request; never throws.
  http::response<http::string_body> answer(const http::request<http::string_body>& request) const noexcept;

 private:
  class Session;

  void accepted(error_code error, tcp::socket socket);
  void close();

  const HttpOptions options_;
  const Handler handler_;
  const std::function<void()> on_refused_;
  tcp::acceptor acceptor_;
  asio::steady_timer pause_;
  std::unordered_set<Session*> sessions_;
  uint16_t port_ = 0;
  bool stopped_ = false;
};

/// One connection: read, answer, write, again. Alive as long as an operation holds it.
class HttpServer::Listener::Session : public std::enable_shared_from_this<Session> {
 public:
  Session(std::shared_ptr<Listener> listener, tcp::socket socket)
      : listener_(std::move(listener)), stream_(std::move(socket)) {
    listener_->sessions_.insert(this);
  }
  ~Session() { listener_->sessions_.erase(this); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void read() {
    parser_.emplace();
    parser_->header_limit(kMaxHeader);
    parser_->body_limit(kMaxBody);
    stream_.expires_after(listener_->options().read_timeout);  // for the whole request, however slowly it trickles
    http::async_read(stream_, buffer_, *parser_, beast::bind_front_handler(&Session::got, shared_from_this()));
  }

  void close() { stream_.close(); }

 private:
  void got(error_code error, std::size_t) {
    if (!error) {
      response_ = listener_->answer(parser_->get());
      stream_.expires_after(listener_->options().write_timeout);
      http::async_write(stream_, response_, beast::bind_front_handler(&Session::sent, shared_from_this()));
      return;
    }
    const bool idle = !parser_->got_some() && buffer_.size() == 0;
    const bool gone = error == http::error::end_of_stream || error == asio::error::connection_reset ||
                      error == asio::error::operation_aborted;
    if (!gone && !(idle && error == beast::error::timeout)) listener_->refused();
    hang_up();
  }

  void sent(error_code error, std::size_t) {
    if (error == beast::error::timeout) listener_->refused();
    if (error || response_.need_eof())
      hang_up();
    else
      read();
  }

  void hang_up() {
    error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    close();
  }

  std::shared_ptr<Listener> listener_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_{kMaxHeader + kMaxBody};
  std::optional<http::request_parser<http::string_body>> parser_;
  http::response<http::string_body> response_;
};

void HttpServer::Listener::accepted(error_code error, tcp::socket socket) {
  if (stopped_) return;
  if (error) {
    log_error("accept failed", {{"where", "http"}, {"reason", error.message()}});
    pause_.expires_after(kAcceptPause);
    pause_.async_wait([self = shared_from_this()](error_code) {
      if (!self->stopped_) self->accept();
    });
    return;
  }
  if (sessions_.size() >= options_.connections)
    refused();
  else
    std::make_shared<Session>(shared_from_this(), std::move(socket))->read();
  accept();
}

void HttpServer::Listener::close() {
  stopped_ = true;
  error_code ignored;
  acceptor_.close(ignored);
  pause_.cancel();
  for (Session* session : sessions_) session->close();
}

http::response<http::string_body> HttpServer::Listener::answer(
    const http::request<http::string_body>& request) const noexcept {
  const bool head = request.method() == http::verb::head;
  HttpAnswer a;
  try {
    const std::string_view target(request.target().data(), request.target().size());
    if (!head && request.method() != http::verb::get)
      a = {405, "only GET and HEAD\n", kTypeText};
    else if (stopped_)
      a = {503, "stopping\n", kTypeText};
    else
      a = handler_(target.substr(0, target.find('?')));
  } catch (...) {
    a = {500, "internal error\n", kTypeText};
  }
  http::response<http::string_body> response(static_cast<http::status>(a.status), request.version() >= 11 ? 11 : 10);
  response.set(http::field::content_type, a.type);
  response.set("X-Content-Type-Options", "nosniff");  // a name that an engine chose is in the JSON: it is no page
  if (!a.policy.empty()) response.set("Content-Security-Policy", a.policy);
  if (a.status == 405) response.set(http::field::allow, "GET, HEAD");
  response.keep_alive(request.keep_alive());
  response.content_length(a.body.size());
  if (!head) response.body() = std::move(a.body);
  return response;
}

HttpServer::HttpServer(asio::io_context& io, const std::string& listen, Handler handler,
                       std::function<void()> on_refused, HttpOptions options)
    : listener_(std::make_shared<Listener>(io, listen, std::move(handler), std::move(on_refused), options)) {
  listener_->accept();
}

HttpServer::~HttpServer() { stop(); }
uint16_t HttpServer::port() const { return listener_->port(); }
void HttpServer::stop() { listener_->stop(); }

}  // namespace moed
