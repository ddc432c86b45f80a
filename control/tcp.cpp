#include "control/tcp.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <stdexcept>

namespace moed::control {

namespace asio = boost::asio;
using asio::ip::tcp;

HostPort split(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) throw std::runtime_error("'" + text + "' is not host:port");
  std::string host = text.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return {host, text.substr(colon + 1)};
}

tcp::acceptor listen_on(asio::io_context& io, const std::string& where) {
  const HostPort at = split(where);
  boost::system::error_code error;
  tcp::endpoint endpoint(tcp::v6(), 0);
  if (at.host.empty()) {
    endpoint = {tcp::v6(), static_cast<uint16_t>(std::stoul(at.port))};
  } else {
    const auto found = tcp::resolver(io).resolve(at.host, at.port, tcp::resolver::passive, error);
    if (error || found.empty()) throw std::runtime_error("cannot resolve " + where + ": " + error.message());
    endpoint = *found.begin();
  }
  tcp::acceptor acceptor(io);
  acceptor.open(endpoint.protocol(), error);
  if (error && at.host.empty()) {  // a host without IPv6
    endpoint = {tcp::v4(), endpoint.port()};
    acceptor.open(endpoint.protocol(), error);
  } else if (at.host.empty()) {
    acceptor.set_option(asio::ip::v6_only(false), error);
  }
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) throw std::runtime_error("cannot listen on " + where + " (control.listen): " + error.message());
  return acceptor;
}

}  // namespace moed::control
