// Every device kernel, for host threads (emulated_device.hpp).
#include "cuda/kernels.cu"

#include "cuda/gate.cu"
#include "cuda/low_latency_exchange.cu"
#include "cuda/low_latency_reduce.cu"
#include "cuda/packet_all_reduce.cu"
#include "cuda/packet_exchange.cu"
#include "cuda/packet_reduce_scatter.cu"
#include "cuda/push_exchange.cu"
#include "cuda/push_reduce_scatter.cu"
#include "cuda/ring_exchange.cu"
#include "cuda/sum_pieces.cu"
#include "cuda/two_shot_all_reduce.cu"
