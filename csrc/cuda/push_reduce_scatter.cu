// Large reduce_scatter: every rank pushes each peer's part into that peer's queue, chunk by chunk.
// It adds up its own part with what the peers pushed. Two teams do so, each at its own pace:
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
  DPT_SHARED(PipelineState<2>, state);
  const Attendance attendance(group, call);
  state.start();
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint32_t peers = all_peers(group);
  const Scale scale{arguments.input_factor, arguments.result_factor};
  using VectorReducer = Reducer<T, Sum, Vector>;
  const ChunkOf chunk(cut);

  const auto push = [&](const Team& team) {
    const Sender inputs(group, kInputs, state.ends, team);
    return team.run(
        cut.rounds,
        [&](uint32_t round) {
          team.split(size - 1, [&](int part, const WorkerGroup& workers) {
            const int peer = (rank + 1 + part) % size;
            push_scaled_chunk<VectorReducer>(workers,
                                             arguments.parts[peer] + chunk.offset(round),
                                             chunk.bytes(round),
                                             inputs.slot(peer, round),
                                             scale);
          });
        },
        SignalWarp{[&](uint32_t round) { return inputs.has_room(round, peers); },
                   [&](uint32_t round) { inputs.publish(round, peers); },
                   [&] { inputs.close(cut.rounds); }});
  };

  const auto reduce = [&](const Team& team) {
    const Receiver inputs(group, kInputs, state.ends, team);
    return team.run(
        cut.rounds,
        [&](uint32_t round) {
          const uint64_t at = chunk.offset(round);
          reduce_chunk<VectorReducer, kRanks>(
              team.workers(),
              group,
              [&](int source) { return inputs.slot(source, round); },
              {arguments.parts[rank] + at, arguments.output + at, chunk.bytes(round), scale},
              [](uint32_t, const Vector&, uint64_t) {});
        },
        SignalWarp{[&](uint32_t round) { return inputs.has_come(round, peers); },
                   [&](uint32_t round) { inputs.release(round, peers); },
                   [&] { inputs.close(cut.rounds); }});
  };

  // The other team has an own part beside the peers'.
  const int warps = num_threads() / kWarp;
  const int some = warps * 7 / 16;
  const Team pushers(group, call, 0, some, state.progress[0]);
  const Team reducers(group, call, some, warps - some, state.progress[1]);
  bool ok = true;
  if (pushers.has_me()) ok = push(pushers);
  if (reducers.has_me()) ok = reduce(reducers);
  attendance.end(ok);
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
