// Times plans for operations on the device in the middle of a program, and the delegate: rounds of
// calls back to back on the caller's stream, behind a gate, by the device's own clock.
#pragma once

#include <memory>
#include <vector>

#include "comm/calibration.hpp"
#include "cuda/device_group.hpp"
#include "cuda/device_trials.hpp"

namespace dpt {

class DeviceBench final : public Bench {
 public:
  // `request` is the program's, which all ranks are about to start. `delegate`: nullptr, it does
  // not compete. `by_nodes`: it goes through nodes in stages where it would.
  DeviceBench(DeviceGroup& group,
              const dpt_request& request,
              const dpt_delegate* delegate,
              bool by_nodes = false)
      : group_(group), request_(request), delegate_(delegate), by_nodes_(by_nodes) {}

  bool is_busy() const override {
    return request_.busy != nullptr && request_.busy(request_.call) != 0;
  }
  Result measure(const RunContext& context, int bucket) override;

 private:
  DeviceGroup& group_;
  const dpt_request& request_;
  const dpt_delegate* delegate_;
  bool by_nodes_;
};

}  // namespace dpt
