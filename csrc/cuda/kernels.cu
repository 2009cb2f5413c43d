// Host code that all kernels have in common.
#include "cuda/start.cuh"

namespace dpt::cuda {

void load_low_latency_reduce();
void load_low_latency_exchange();
void load_packet_all_reduce();
void load_packet_reduce_scatter();
void load_packet_exchange();
void load_push_reduce_scatter();
void load_two_shot_all_reduce();
void load_tree_all_reduce();
void load_push_exchange();
void load_ring_exchange();
void load_gate();

bool can_reduce_on_device(DataType dtype, ReduceOp op) {
  const bool floating =
      dtype == DPT_FLOAT32 || dtype == DPT_BFLOAT16 || dtype == DPT_FLOAT16 || dtype == DPT_FLOAT64;
  // Integers have no average here: torch rounds it in its own way.
  if (!floating && (op == DPT_AVG || op == DPT_PREMUL_SUM)) return false;
  const bool has_op = visit_reduce_op(op, [](auto) {});
  return has_op && visit_dtype(dtype, [](auto) {});
}

bool has_large_kernels(DataType dtype, ReduceOp op) {
  const bool sums = op == DPT_SUM || op == DPT_AVG || op == DPT_PREMUL_SUM;
  return sums && visit_large_dtype(dtype, [](auto) {});
}

void load_kernels() {
  load_low_latency_reduce();
  load_low_latency_exchange();
  load_packet_all_reduce();
  load_packet_reduce_scatter();
  load_packet_exchange();
  load_push_reduce_scatter();
  load_two_shot_all_reduce();
  load_tree_all_reduce();
  load_push_exchange();
  load_ring_exchange();
  load_gate();
}

}  // namespace dpt::cuda
