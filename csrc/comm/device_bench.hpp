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
  struct Options {
    bool by_nodes = false;  // the delegate goes through nodes in stages where it would
    bool divides = false;   // it is also tried with a part of the message, beside CPU-Reduce
  };
  // `request` is the program's, which all ranks are about to start. `delegate`: nullptr, it does
  // not compete.
  DeviceBench(DeviceGroup& group,
              const dpt_request& request,
              const dpt_delegate* delegate,
              Options options)
      : group_(group), request_(request), delegate_(delegate), options_(options) {}

  bool is_busy() const override {
    return request_.busy != nullptr && request_.busy(request_.call) != 0;
  }
  Result measure(const RunContext& context, int bucket) override;

 private:
  DeviceGroup& group_;
  const dpt_request& request_;
  const dpt_delegate* delegate_;
  Options options_;
};

}  // namespace dpt
