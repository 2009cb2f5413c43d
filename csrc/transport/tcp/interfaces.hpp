// Addresses of this node, and which of them reach the other nodes.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace dpt {

// An IPv4 or IPv6 address with a port, as the socket calls take it.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  // Error(DPT_ERR_INVALID) for a text that is no numeric address.
  static SocketAddress parse(const std::string& ip, uint16_t port);
  std::string ip() const;
  uint16_t port() const;
  std::string describe() const;  // "10.0.0.2:4242", "[fd00::2]:4242"
  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

struct Interface {
  std::string name;
  std::string ip;
  int prefix = 0;  // bits of the network's part
  bool operator==(const Interface&) const = default;
};

// Every address of the interfaces that are up, IPv4 before IPv6, without link-local ones, which
// mean another node on every link.
std::vector<Interface> list_interfaces();

// "eth0 10.0.0.1 24 ..." and back. Error(DPT_ERR_INVALID).
std::string serialize(const std::vector<Interface>& interfaces);
std::vector<Interface> parse_interfaces(const std::string& text);

// One address for each name of `wanted`. Error(DPT_ERR_SYSTEM) names one that isn't there.
std::vector<Interface> select_interfaces(const std::vector<Interface>& all,
                                         const std::vector<std::string>& wanted);

// The address from which the kernel's routes reach `ip`, or nothing.
std::optional<std::string> source_towards(const std::string& ip);

using Route = std::function<std::optional<std::string>(const std::string& ip)>;

// The own address that reaches a rank of every other node, given what each published. It is the one
// in a network that all share, else the one the routes to most of them start from. Addresses that
// another node has too (bridges of container runtimes) lead nowhere and are passed over. Nothing
// when no route leads there.
std::optional<Interface> interface_towards(const std::vector<Interface>& own,
                                           const std::vector<std::vector<Interface>>& others,
                                           const Route& route);

}  // namespace dpt
