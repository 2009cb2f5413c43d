// A staged group's lanes (staged/copy_engine.hpp) as CUDA streams: copies by the copy engines,
// words by stream memory operations, sums by a small kernel (sum_pieces.hpp). Nothing else is
// launched, so what only copies takes no multiprocessor.
#pragma once

#include <memory>

#include "staged/copy_engine.hpp"

namespace dpt::cuda {

// Whether slots are in the memory of devices that reach each other's, or in the host's.
enum class Slots { kOnHost, kOnDevices };
// Throws Error(DPT_ERR_SYSTEM) where the driver can't do it or has no queues left.
std::unique_ptr<staged::CopyEngine> make_copy_engine(int device, Slots slots);

}  // namespace dpt::cuda
