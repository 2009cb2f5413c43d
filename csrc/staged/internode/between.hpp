// A rank's connections to its partners on other nodes, for the slots of a staged group.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "transport/tcp/links.hpp"

namespace dpt {

struct TcpGroup;

namespace staged {

struct Between {
  Links links;
  // The links broke. Called by a worker.
  std::function<void(dpt_status status, const std::string& reason)> on_trouble;
};

// Called by all ranks of the group. Throws Error(DPT_ERR_SYSTEM) where there are none to be had.
std::shared_ptr<Between> connect_between(const TcpGroup& group,
                                         const Connection::Host& host,
                                         const WaitContext& wait);

}  // namespace staged

}  // namespace dpt
