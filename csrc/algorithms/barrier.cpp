// Barrier: entering is all there is.
#include "algorithms/algorithm.hpp"

namespace dpt {

const Algorithm kBarrier{AlgorithmName::kBarrier, DPT_BARRIER, enter_small};

}  // namespace dpt
