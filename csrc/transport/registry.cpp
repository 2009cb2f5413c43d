#include "transport/shm/shm_transport.hpp"
#include "transport/tcp/tcp_transport.hpp"
#include "transport/transport.hpp"

namespace dpt {

TransportChoice choose_transport(const std::vector<PeerInfo>& peers,
                                 const std::vector<int64_t>& global_ranks) {
  static const Transport* const table[] = {&kShmTransport, &kTcpTransport};
  TransportChoice choice;
  for (const Transport* transport : table) {
    const std::string reason = transport->why_not(peers, global_ranks);
    if (reason.empty()) return {transport, ""};
    choice.why_not += (choice.why_not.empty() ? "" : "; ") + reason;
  }
  return choice;
}

}  // namespace dpt
