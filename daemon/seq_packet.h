// Unix sockets that keep message boundaries, for Asio: 1.74 knows them only as a generic protocol, which cannot listen.
#pragma once

#include <sys/socket.h>

#include <utility>

#include <boost/asio/basic_seq_packet_socket.hpp>
#include <boost/asio/basic_socket_acceptor.hpp>
#include <boost/asio/local/basic_endpoint.hpp>

namespace moed {

class SeqPacket {
 public:
  using endpoint = boost::asio::local::basic_endpoint<SeqPacket>;
  using socket = boost::asio::basic_seq_packet_socket<SeqPacket>;
  using acceptor = boost::asio::basic_socket_acceptor<SeqPacket>;
  int type() const { return SOCK_SEQPACKET | SOCK_CLOEXEC; }
  int protocol() const { return 0; }
  int family() const { return AF_UNIX; }
};

}  // namespace moed
