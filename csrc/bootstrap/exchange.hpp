// Exchanges through the store, before ranks share anything faster.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/wait.hpp"
#include "bootstrap/store.hpp"

namespace dpt {

// Facts about one rank's process that decide which transports can reach it.
struct PeerInfo {
  std::string process;  // random id of the process (new after fork)
  std::string boot_id;  // the same on every process of a running kernel
  std::string network;  // network namespace: abstract sockets end at its border
  std::string node;     // the same on every process that shares this one's memory
  int64_t pid = 0;
  int usable_cores = 1;            // affinity and quota
  size_t max_chunk_bytes = 0;      // of staging that the process has left for this group
  size_t fixed_chunk_bytes = 0;    // what the user wants chunks to be; 0: nothing
  std::vector<uint64_t> affinity;  // one bit per logical core
  std::string mark;                // own_process_mark of that process

  std::string serialize() const;
  static PeerInfo parse(const std::string& text);  // Error(DPT_ERR_INVALID) when malformed
  static PeerInfo of_this_process();
};

// Each rank's `mine`, in rank order. Waits for every rank until wait.deadline; the error names the
// ranks that did not come.
std::vector<std::string> all_gather(Store& store,
                                    const std::string& key,
                                    int rank,
                                    const std::vector<int64_t>& global_ranks,
                                    const std::string& mine,
                                    const WaitContext& wait);

// Under this, by rank in the group, who has made the group leaves the mark of its process.
constexpr const char* kProcessKey = "deepytorch/process/";
// How that ends once it has destroyed the group without having joined it.
constexpr const char* kLeftMark = " left";

// A group's ranks meeting anew.
struct Meeting {
  std::string id;                  // fresh: prefix for keys that no earlier meeting can have used
  std::vector<std::string> words;  // each rank's `mine`, in rank order
};

// Brings the ranks of a group together. Earlier groups of the same name may have used the store,
// and members may have different pasts. So rank 0 announces a fresh id, and the others answer under
// it. A rank goes by rank 0's list only if it finds its own fresh answer in it. `mine` is one line.
// Waits and fails as all_gather does.
Meeting meet(Store& store,
             int rank,
             const std::vector<int64_t>& global_ranks,
             const std::string& mine,
             const WaitContext& wait);

// One key, waited for in slices so that Ctrl-C works. Error(DPT_ERR_TIMEOUT) with `what`.
std::string wait_for_key(Store& store,
                         const std::string& key,
                         const WaitContext& wait,
                         const std::string& what);

// Identifies this process to others on the same node; one line.
std::string own_process_mark();
// This time may follow a mark: when it was left.
std::string stamp_of_now();
// The pid behind a mark when that process has certainly ended; nothing while it lives, or when it
// can't be seen from here (another node or pid namespace). Nor where a stamp says that the mark was
// left before this process started: launchers start ranks again over the same store, and then it is
// of a rank's earlier life.
std::optional<std::string> dead_process(const std::string& mark);

// 128 random bits in hex.
std::string random_id();

}  // namespace dpt
