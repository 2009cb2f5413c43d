#include "transport/tcp/interfaces.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <sstream>

#include "base/error.hpp"
#include "base/unique_fd.hpp"

namespace dpt {
namespace {

std::vector<uint8_t> bytes_of(const SocketAddress& address) {
  const auto copy = [](const auto& field) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&field);
    return std::vector<uint8_t>(bytes, bytes + sizeof field);
  };
  if (address.family() == AF_INET) {
    return copy(reinterpret_cast<const sockaddr_in*>(address.get())->sin_addr);
  }
  return copy(reinterpret_cast<const sockaddr_in6*>(address.get())->sin6_addr);
}

bool in_network(const Interface& network, const std::string& ip) {
  const std::vector<uint8_t> a = bytes_of(SocketAddress::parse(network.ip, 0));
  const std::vector<uint8_t> b = bytes_of(SocketAddress::parse(ip, 0));
  if (a.size() != b.size()) return false;
  for (int bit = 0; bit < network.prefix; ++bit) {
    const int mask = 0x80 >> (bit % 8);
    if ((a[bit / 8] & mask) != (b[bit / 8] & mask)) return false;
  }
  return true;
}

bool is_loopback(const std::string& ip) { return ip == "::1" || ip.starts_with("127."); }

int prefix_of(const sockaddr* mask, int family) {
  if (mask == nullptr) return 0;
  SocketAddress address;
  std::memcpy(
      &address.storage, mask, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  address.storage.ss_family = static_cast<sa_family_t>(family);
  int bits = 0;
  for (const uint8_t byte : bytes_of(address)) bits += std::popcount(byte);
  return bits;
}

}  // namespace

SocketAddress SocketAddress::parse(const std::string& ip, uint16_t port) {
  SocketAddress address;
  auto* four = reinterpret_cast<sockaddr_in*>(address.get());
  auto* six = reinterpret_cast<sockaddr_in6*>(address.get());
  if (inet_pton(AF_INET, ip.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    address.length = sizeof *four;
  } else if (inet_pton(AF_INET6, ip.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    address.length = sizeof *six;
  } else {
    throw Error(DPT_ERR_INVALID, "\"" + ip + "\" is no IP address");
  }
  return address;
}

std::string SocketAddress::ip() const {
  char text[INET6_ADDRSTRLEN] = "";
  if (family() == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(get())->sin_addr, text, sizeof text);
  } else {
    inet_ntop(
        AF_INET6, &reinterpret_cast<const sockaddr_in6*>(get())->sin6_addr, text, sizeof text);
  }
  return text;
}

uint16_t SocketAddress::port() const {
  return ntohs(family() == AF_INET ? reinterpret_cast<const sockaddr_in*>(get())->sin_port
                                   : reinterpret_cast<const sockaddr_in6*>(get())->sin6_port);
}

std::string SocketAddress::describe() const {
  const std::string host = family() == AF_INET ? ip() : "[" + ip() + "]";
  return host + ":" + std::to_string(port());
}

std::vector<Interface> list_interfaces() {
  ifaddrs* list = nullptr;
  DPT_SYS_CHECK(getifaddrs(&list));
  std::vector<Interface> found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if ((entry->ifa_flags & IFF_UP) == 0) continue;
      SocketAddress address;
      address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::memcpy(&address.storage, entry->ifa_addr, address.length);
      const auto* six = reinterpret_cast<const sockaddr_in6*>(address.get());
      if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr)) continue;
      found.push_back({entry->ifa_name, address.ip(), prefix_of(entry->ifa_netmask, family)});
    }
  }
  freeifaddrs(list);
  return found;
}

std::string serialize(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const Interface& each : interfaces) {
    text +=
        (text.empty() ? "" : " ") + each.name + " " + each.ip + " " + std::to_string(each.prefix);
  }
  return text;
}

std::vector<Interface> parse_interfaces(const std::string& text) {
  std::istringstream in(text);
  std::vector<Interface> interfaces;
  for (Interface each; in >> each.name;) {
    if (!(in >> each.ip >> each.prefix)) {
      throw Error(DPT_ERR_INVALID, "a rank published malformed addresses");
    }
    SocketAddress::parse(each.ip, 0);
    interfaces.push_back(each);
  }
  return interfaces;
}

std::vector<Interface> select_interfaces(const std::vector<Interface>& all,
                                         const std::vector<std::string>& wanted) {
  std::vector<Interface> selected;
  for (const std::string& name : wanted) {
    const auto found = std::find_if(
        all.begin(), all.end(), [&](const Interface& each) { return each.name == name; });
    if (found != all.end()) {
      selected.push_back(*found);
      continue;
    }
    std::string known;
    for (const Interface& each : all) {
      if (known.find(each.name) == std::string::npos) known += " " + each.name;
    }
    throw Error(DPT_ERR_SYSTEM,
                "ifname (DEEPYTORCH_IFNAME): there is no network interface \"" + name +
                    "\" with an address here; there is:" + known);
  }
  return selected;
}

std::optional<std::string> source_towards(const std::string& ip) {
  const SocketAddress target = SocketAddress::parse(ip, 9);
  // Connecting a datagram socket sends nothing: it only asks the routing table.
  const UniqueFd probe(socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (probe.get() < 0 || connect(probe.get(), target.get(), target.length) != 0) {
    return std::nullopt;
  }
  SocketAddress source;
  source.length = sizeof source.storage;
  if (getsockname(probe.get(), source.get(), &source.length) != 0) return std::nullopt;
  return source.ip();
}

std::optional<Interface> interface_towards(const std::vector<Interface>& own,
                                           const std::vector<std::vector<Interface>>& others,
                                           const Route& route) {
  const auto is_own = [&](const std::string& ip) {
    return std::any_of(
        own.begin(), own.end(), [&](const Interface& each) { return each.ip == ip; });
  };
  // By own address, in how many other nodes' reach it is: in their network, or by some route.
  std::vector<int> shared(own.size(), 0);
  std::vector<int> routed(own.size(), 0);
  for (const std::vector<Interface>& other : others) {
    std::vector<bool> near(own.size(), false);
    std::vector<bool> far(own.size(), false);
    for (const Interface& theirs : other) {
      if (is_loopback(theirs.ip) || is_own(theirs.ip)) continue;
      const auto source = route(theirs.ip);
      for (size_t i = 0; i < own.size(); ++i) {
        if (is_loopback(own[i].ip) || source != own[i].ip) continue;
        far[i] = true;
        if (in_network(own[i], theirs.ip)) near[i] = true;
      }
    }
    for (size_t i = 0; i < own.size(); ++i) {
      shared[i] += near[i];
      routed[i] += far[i];
    }
  }
  size_t best = own.size();
  for (size_t i = 0; i < own.size(); ++i) {
    if (routed[i] == 0) continue;
    const auto rank = [&](size_t at) { return std::pair(routed[at], shared[at]); };
    if (best == own.size() || rank(i) > rank(best)) best = i;
  }
  if (best == own.size()) return std::nullopt;
  return own[best];
}

}  // namespace dpt
