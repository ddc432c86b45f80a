// Addresses and listening sockets of our own TCP.
#pragma once

#include <utility>

#include <boost/asio/ip/tcp.hpp>
#include <string>

namespace moed::control {

struct HostPort {
  std::string host, port;
};

/// "host:port" or "[v6]:port". Throws std::runtime_error when it is neither.
HostPort split(const std::string& text);

/// A socket that listens on "host:port"; host empty: on all addresses, IPv4 and IPv6. Throws std::runtime_error naming
/// address and reason.
boost::asio::ip::tcp::acceptor listen_on(boost::asio::io_context& io, const std::string& where);

}  // namespace moed::control
