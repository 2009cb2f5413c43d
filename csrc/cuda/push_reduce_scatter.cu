// Large reduce_scatter: every rank pushes each peer's part into that peer's queue, chunk by chunk,
// and adds up its own part with what the peers pushed. Two teams, each at its own pace:
//
//   push:    chunk of every peer's part -> queue of that peer
//   reduce:  chunk of the own part and the peers' chunks, in rank order -> output
//
// The own part never leaves the GPU: each link carries (P - 1) / P of the input, once.
#include "cuda/chunks.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

template <typename T, int kRanks>
DPT_KERNEL push_reduce_scatter_kernel(DPT_PARAMETER GroupView group,
                                      DPT_PARAMETER CallView call,
                                      DPT_PARAMETER ReduceArguments arguments,
                                      DPT_PARAMETER Cut cut) {
  DPT_SHARED(QueueEnds, ends);
  Attendance attendance;
  if (!attendance.begin(group, call)) return;
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint32_t peers = all_peers(group);
  const Scale scale{arguments.input_factor, arguments.result_factor};
  using VectorReducer = Reducer<T, Sum, Vector>;
  const ChunkOf chunk(cut);

  const auto push = [&](const Team& team) {
    Sender inputs(group, call, team, kInputs, ends);
    for (uint32_t round = 0; round < cut.rounds; ++round) {
      if (!inputs.reserve(peers)) return false;
      for (int step = 1; step < size; ++step) {
        const int peer = (rank + step) % size;
        push_scaled_chunk<VectorReducer>(team,
                                         arguments.parts[peer] + chunk.offset(round),
                                         chunk.bytes(round),
                                         inputs.slot(peer),
                                         scale);
      }
      inputs.publish(peers);
    }
    inputs.close();
    return true;
  };

  const auto reduce = [&](const Team& team) {
    Receiver inputs(group, call, team, kInputs, ends);
    for (uint32_t round = 0; round < cut.rounds; ++round) {
      if (!inputs.await(peers)) return false;
      const uint64_t at = chunk.offset(round);
      reduce_chunk<VectorReducer, kRanks>(
          team,
          group,
          inputs,
          {arguments.parts[rank] + at, arguments.output + at, chunk.bytes(round), scale},
          [](uint32_t, const Vector&) {});
      inputs.release(peers);
    }
    inputs.close();
    return true;
  };

  const int half = num_threads() / 2;
  const Team pushers(1, 0, half);
  const Team reducers(2, half, half);
  const bool ok = pushers.has_me() ? push(pushers) : reduce(reducers);
  if (sync_channel_and(ok)) attendance.end(group, call);
}

}  // namespace

void push_reduce_scatter(const Launch& launch,
                         const ReduceArguments& arguments,
                         DataType dtype,
                         ReduceOp op) {
  DPT_CHECK(has_large_kernels(dtype, op));
  visit_large(dtype, launch.group, [&](auto element, auto ranks) {
    start(push_reduce_scatter_kernel<decltype(element), ranks>,
          launch,
          launch.group,
          launch.call,
          arguments,
          launch.cut(arguments.bytes));
  });
}

void load_push_reduce_scatter() {
  for_each_large(
      [](auto element, auto ranks) { load(push_reduce_scatter_kernel<decltype(element), ranks>); });
}

}  // namespace dpt::cuda
