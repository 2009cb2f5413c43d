// A staged group's lanes (staged/copy_engine.hpp) as CUDA streams: copies by the copy engines,
// words by stream memory operations. No kernel is launched, so no multiprocessor is taken.
#pragma once

#include <memory>

#include "staged/copy_engine.hpp"

namespace dpt::cuda {

// Throws Error(DPT_ERR_SYSTEM) where the driver can't do it.
std::unique_ptr<staged::CopyEngine> make_copy_engine(int device);

}  // namespace dpt::cuda
