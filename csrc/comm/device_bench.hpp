// Times plans for operations on the device in the middle of a program, and the delegate. It times
// rounds of calls back to back on the caller's stream, behind a gate, by the device's own clock.
#pragma once

#include <map>
#include <utility>

#include "comm/calibration.hpp"
#include "cuda/device_group.hpp"
#include "cuda/device_trials.hpp"

namespace dpt {

class DeviceBench final : public Bench {
 public:
  struct Options {
    bool divides = false;  // the delegate is also tried with a part, beside CPU-Reduce
  };
  // `request` is the program's, which all ranks are about to start. `group`: nullptr, a group that
  // spans nodes has nothing of ours, and the delegate competes with itself in stages. `delegate`:
  // nullptr, it does not compete.
  DeviceBench(DeviceGroup* group,
              const dpt_request& request,
              const dpt_delegate* delegate,
              Options options)
      : group_(group), request_(request), delegate_(delegate), options_(options) {}

  bool is_busy() const override {
    return request_.busy != nullptr && request_.busy(request_.call) != 0;
  }
  int tried_for(int bucket) const override;
  Result measure(const RunContext& context, int bucket) override;

 private:
  bool is_staged() const { return group_ != nullptr && group_->staging().slot_bytes != 0; }

  DeviceGroup* group_;
  const dpt_request& request_;
  const dpt_delegate* delegate_;
  Options options_;
  // For ranges that are measured at the same, smaller one, and for what is not tried at a larger.
  std::map<std::pair<Collective, int>, Entry> measured_;
  bool fails_in_stages_ = false;  // on any rank
};

}  // namespace dpt
