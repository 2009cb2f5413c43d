// A group of GPUs without peer access as a DeviceGroup. All of its data goes through the host's
// memory (csrc/staged), and nothing of a peer's device is mapped or copied.
#pragma once

#include <functional>
#include <memory>

#include "cuda/device_group.hpp"
#include "staged/copy_engine.hpp"
#include "staged/group.hpp"

namespace dpt {

staged::Membership membership_of(const DeviceGroup::Setup& setup);
cuda::Staging staging_of(const staged::Group& group);
std::optional<DeviceGroup::Failure> failure_of(const staged::Group& group);

// As DeviceGroup::connect. `make_engine` may throw Error(DPT_ERR_SYSTEM).
std::unique_ptr<DeviceGroup> connect_staged(
    const DeviceGroup::Setup& setup,
    std::function<std::unique_ptr<staged::CopyEngine>()> make_engine);

}  // namespace dpt
