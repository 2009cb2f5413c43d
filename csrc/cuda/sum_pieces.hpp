// Adds up what a staged group's device has copied down of the other ranks with its own part.
#pragma once

#include "cuda/arguments.hpp"
#include "staged/copy_engine.hpp"

namespace dpt::cuda {

// Few channels keep up with the slots that come over PCIe, and leave the rest of the device to what
// computes beside it.
constexpr Grid kSumGrid{16, 512};

// One kernel, on `stream`. Of what staged::Job leaves to the device.
void sum_pieces(const staged::Pieces& pieces, Stream stream, Grid grid = kSumGrid);
// The first launch of a kernel that is loaded late can block. Throws Error(DPT_ERR_SYSTEM) where
// this build has none for the device.
void load_sum_pieces();

}  // namespace dpt::cuda
