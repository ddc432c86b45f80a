#include "daemon/fetch.h"

#include <utility>

#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "daemon/abi/socket.h"
#include "daemon/abi/status.h"
#include "daemon/abi/text.h"
#include "daemon/seq_packet.h"

namespace moed {
namespace {

namespace asio = boost::asio;

constexpr std::chrono::seconds kLimit{5};
constexpr std::chrono::milliseconds kAgain{5};  ///< while the peer's queue of connections is full

}  // namespace

class Fetcher::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(asio::io_context& io, std::string path, std::vector<Fetch> requests, Done done)
      : socket_(io),
        limit_(io),
        again_(io),
        path_(std::move(path)),
        requests_(std::move(requests)),
        done_(std::move(done)) {}

  void start() {
    limit_.expires_after(kLimit);
    limit_.async_wait([self = shared_from_this()](boost::system::error_code stopped) {
      if (!stopped) self->end(self->path_ + " did not answer within 5 s");
    });
    asio::post(socket_.get_executor(), [self = shared_from_this()] {
      if (self->done_) self->connect();
    });
  }

  void cancel() {
    done_ = nullptr;
    close();
  }

 private:
  /// A Unix socket connects at once, fails at once, or is full for now (EAGAIN).
  void connect() {
    boost::system::error_code error;
    socket_.close(error);
    socket_.open(SeqPacket(), error);
    if (!error) socket_.non_blocking(true, error);
    if (!error) socket_.connect(SeqPacket::endpoint(path_), error);
    if (!error) return ask();
    if (error != asio::error::try_again && error != asio::error::would_block)
      return end("cannot connect to " + path_ + ": " + error.message());
    again_.expires_after(kAgain);
    again_.async_wait([self = shared_from_this()](boost::system::error_code stopped) {
      if (!stopped && self->done_) self->connect();
    });
  }

  void ask() {
    if (fds_.size() == requests_.size()) return end("");
    if (!send_message(socket_.native_handle(), &requests_[fds_.size()], sizeof(Fetch)))
      return end("cannot ask " + path_ + ": " + std::strerror(errno));
    socket_.async_wait(SeqPacket::socket::wait_read, [self = shared_from_this()](boost::system::error_code error) {
      if (!self->done_) return;
      if (error) return self->end("no answer from " + self->path_ + ": " + error.message());
      self->hear();
    });
  }

  void hear() {
    Answer answer;
    std::vector<Fd> fds;
    const ssize_t got = receive_message(socket_.native_handle(), {reinterpret_cast<std::byte*>(&answer), sizeof answer},
                                        fds, MSG_DONTWAIT);
    if (got != static_cast<ssize_t>(sizeof answer)) return end(path_ + " closed the connection");
    if (answer.status != static_cast<uint32_t>(Status::ok) || fds.size() != 1)
      return end(path_ + " refused: " + field_text(answer.text));
    fds_.push_back(std::move(fds.front()));
    ask();
  }

  void end(const std::string& why) {
    const Done done = std::exchange(done_, nullptr);
    close();
    if (!done) return;
    if (!why.empty()) fds_.clear();
    done(std::move(fds_), why);
  }

  void close() {
    boost::system::error_code ignored;
    limit_.cancel();
    again_.cancel();
    socket_.close(ignored);
  }

  SeqPacket::socket socket_;
  asio::steady_timer limit_, again_;
  const std::string path_;
  const std::vector<Fetch> requests_;
  std::vector<Fd> fds_;
  Done done_;
};

Fetcher::Fetcher(asio::io_context& io, const std::string& path, std::vector<Fetch> requests, Done done)
    : impl_(std::make_shared<Impl>(io, path, std::move(requests), std::move(done))) {
  impl_->start();
}
Fetcher::~Fetcher() { impl_->cancel(); }

}  // namespace moed
