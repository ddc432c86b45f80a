// One page of a daemon's HTTP server, and one number of it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "daemon/abi/fd.h"

namespace moed::test {

/// The whole answer, headers included; it must come within 5 s.
inline std::string get_page(uint16_t port, const std::string& path) {
  const Fd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval limit{5, 0};
  ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  const std::string request = "GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size()))
    throw std::runtime_error("no HTTP server on port " + std::to_string(port));
  std::string text;
  char part[4096];
  for (ssize_t got = 0; (got = ::recv(fd.get(), part, sizeof part, 0)) > 0;)
    text.append(part, static_cast<size_t>(got));
  return text;
}

/// The value of one series, such as moed_ready or moed_peer_last_total{peer="2"}. Throws when it is not there.
inline double metric(const std::string& page, const std::string& series) {
  const size_t at = page.find("\n" + series + " ");
  if (at == std::string::npos) throw std::runtime_error(series + " is not exported");
  return std::strtod(page.c_str() + at + series.size() + 2, nullptr);
}

}  // namespace moed::test
