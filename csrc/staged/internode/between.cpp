#include "staged/internode/between.hpp"

#include "transport/tcp/tcp_transport.hpp"

namespace dpt::staged {

std::shared_ptr<Between> connect_between(const TcpGroup& group,
                                         const Connection::Host& host,
                                         const WaitContext& wait) {
  TcpConnection connection = connect_tcp(group, wait);
  if (!connection.why_not.empty()) throw Error(DPT_ERR_SYSTEM, connection.why_not);
  auto between = std::make_shared<Between>();
  for (auto& [rank, peer] : connection.peers) between->links.add(rank, std::move(peer), host);
  between->on_trouble = host.on_trouble;
  return between;
}

}  // namespace dpt::staged
