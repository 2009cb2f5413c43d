// c10d's sends and receives.
#include <c10/util/Exception.h>

#include "backend.hpp"

namespace dpt::c10d_adapter {
namespace {

void check_message(const char* op, const std::vector<at::Tensor>& tensors, int tag) {
  DPT_CHECK_VALUE(tensors.size() == 1,
                  {op, " takes one tensor, got ", std::to_string(tensors.size())});
  DPT_CHECK_VALUE(tag >= 0, {op, ": tag ", std::to_string(tag), " is negative"});
}

}  // namespace

WorkPtr Backend::send(std::vector<at::Tensor>& tensors, int peer, int tag) {
  check_message("send", tensors, tag);
  check_root("send", peer);
  return submit({.collective = DPT_SEND,
                 .op_type = c10d::OpType::SEND,
                 .title = "send",
                 .inputs = tensors,
                 .root = peer,
                 .tag = tag,
                 .results = tensors},
                replaying(
                    [](c10d::Backend& stock, auto& tensors, auto& peer, auto& tag) {
                      return stock.send(tensors, peer, tag);
                    },
                    tensors,
                    peer,
                    tag));
}

WorkPtr Backend::recv(std::vector<at::Tensor>& tensors, int peer, int tag) {
  check_root("recv", peer);
  return receive(tensors,
                 peer,
                 tag,
                 replaying(
                     [](c10d::Backend& stock, auto& tensors, auto& peer, auto& tag) {
                       return stock.recv(tensors, peer, tag);
                     },
                     tensors,
                     peer,
                     tag));
}

WorkPtr Backend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return receive(tensors,
                 DPT_ANY_RANK,
                 tag,
                 replaying(
                     [](c10d::Backend& stock, auto& tensors, auto& tag) {
                       return stock.recvAnysource(tensors, tag);
                     },
                     tensors,
                     tag));
}

WorkPtr Backend::receive(std::vector<at::Tensor>& tensors,
                         int peer,
                         int tag,
                         const Replay& replay) {
  check_message("recv", tensors, tag);
  const bool any = peer == DPT_ANY_RANK;
  return submit({.collective = DPT_RECV,
                 .op_type = any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV,
                 .title = any ? "recvAnySource" : "recv",
                 .outputs = tensors,
                 .root = peer,
                 .tag = tag,
                 .source = std::make_shared<int>(peer),
                 .shown = tensors},
                replay);
}

}  // namespace dpt::c10d_adapter
