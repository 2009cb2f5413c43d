// The facts a process group was made with, which all its parts read.
//
// Thread safety: they are constant, except for the timeout in `options`, which setTimeout changes,
// and `hooks.closed`, which the backend alone touches, at the group's end.
#pragma once

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "deepytorch.h"
#include "work.hpp"

namespace dpt::c10d_adapter {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Milliseconds = std::chrono::milliseconds;

struct GroupOptions : c10d::Backend::Options {
  explicit GroupOptions(Milliseconds timeout = kBackendDefaultTimeout,
                        const std::string& name = "deepytorch")
      : c10d::Backend::Options(name, timeout) {}

  // NOTE [Gloo's layout] Where a group is called gloo, DDP's logger takes its backend for
  // ProcessGroupGloo, unasked, and reads options->threads. So options and threads lie where that
  // class has them: two words behind c10d's members, and behind a list of devices.
  std::vector<std::shared_ptr<void>> devices;
  int threads = 2;
};

struct GroupSetup {
  // The stock backends, to which the core delegates.
  struct Stock {
    // Makes the one for a device type ("cpu", "cuda"); called at most once for each.
    std::function<BackendPtr(const std::string& device_type, double limit_s)> make;
    // Makes the one that goes through nodes in stages; likewise. Unset: there is none.
    std::function<BackendPtr(const std::string& device_type, const std::vector<int>& node_of)>
        make_by_nodes;
    // "rank 1 (pid 4711) died", or nothing; asked after the stock backend failed on host memory.
    std::function<std::string()> who_died;
    bool competes = false;  // native code must be faster than the stock backend
  };

  // The group's options in the core.
  struct Core {
    bool native = false;
    dpt_tune tune = DPT_TUNE_OFF;
    std::string profile;        // path; empty: none
    size_t staging_bytes = 0;   // 0: the core's default
    bool raise_errors = false;  // of GPUs; else they end the process
  };

  // Each is unset where nobody asked for it.
  struct Hooks {
    // Gives the words to be said before the failure of an operation, or nothing.
    Explain explain;
    // Compares what this rank is about to start with the other ranks', and throws where they
    // differ.
    std::function<void(const std::string& call)> compare;
    // Says what is wrong with a tensor that is going to be summed, or nothing.
    std::function<std::string(const at::Tensor&)> inspect;
    // Called when the group has ended, or its last holder has gone.
    std::function<void()> closed;
  };

  // Registered memory on GPUs, where this process has any; unset: NCCL allocates.
  struct DeviceMemory {
    std::function<bool()> is_there;
    std::function<at::Tensor(int64_t size, at::ScalarType dtype, at::Device device)> allocate;
  };

  // An operation's own limit, or the group's.
  Milliseconds limit_of(Milliseconds own) const {
    return own == c10d::kUnsetTimeout ? options->timeout : own;
  }
  // An operation's name in a profile, as the stock backend's: "gloo:all_reduce"; empty while
  // nothing profiles.
  std::string profiled_as(const char* title, at::DeviceType device) const;

  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  // Timeout, group name, global ranks; see [Gloo's layout].
  c10::intrusive_ptr<GroupOptions> options;
  const dpt_api* api;
  // The group was asked for as "deepytorch". Others bear the names of the stock backends that we
  // stand for, since programs branch on them.
  bool own_name;
  Stock stock;
  Core core;
  Hooks hooks;
  DeviceMemory device_memory;
};

}  // namespace dpt::c10d_adapter
