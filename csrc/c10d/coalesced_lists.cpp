#include "coalesced_lists.hpp"

#include <c10/util/ScopeExit.h>

#include <algorithm>

namespace dpt::c10d_adapter {
namespace {

// While `submit` asks what it is that would be started. All is checked then, before anything is.
struct Asking {
  const CoalescedLists* lists;
  at::Device device;
  std::vector<dpt_request> requests = {};
  bool are_plain = true;
};

thread_local Asking* asking = nullptr;

}  // namespace

bool CoalescedLists::take_request(const Call& call) const {
  if (asking == nullptr || asking->lists != this) return false;
  asking->are_plain =
      asking->are_plain && call.device() == asking->device &&
      device_.describe_plain(call, asking->device, &asking->requests.emplace_back(dpt_request{}));
  return true;
}

WorkPtr CoalescedLists::submit(c10d::OpType op_type,
                               const std::vector<at::Tensor>& inputs,
                               const std::vector<at::Tensor>& results,
                               c10::function_ref<WorkPtr(size_t)> start,
                               DeviceOperations::Together together) {
  std::vector<WorkPtr> works;
  Places started;
  const bool is_debugged = checks_.are_on();
  if (together && inputs.size() > 1 && inputs[0].is_cuda() && !parts_.coalescing.is_open() &&
      !is_debugged) {
    Asking mine{this, inputs[0].device()};
    {
      ++askers_;
      asking = &mine;
      const auto asked = c10::make_scope_exit([this] {
        asking = nullptr;
        --askers_;
      });
      for (size_t i = 0; i < inputs.size(); ++i) start(i);
    }
    // NCCL's backend refuses a list of several types, which may as well be one by one.
    const bool is_one_type =
        std::all_of(mine.requests.begin(), mine.requests.end(), [&](const dpt_request& each) {
          return each.dtype == mine.requests[0].dtype;
        });
    WorkPtr work;
    if (mine.are_plain && is_one_type) {
      started = device_.start_together(mine.device, mine.requests, together, &work);
    }
    if (work) works.push_back(std::move(work));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (std::binary_search(started.begin(), started.end(), i)) continue;
    if (WorkPtr one = start(i)) works.push_back(std::move(one));
  }
  return join_works(parts_.setup.rank, op_type, std::move(works), results);
}

}  // namespace dpt::c10d_adapter
