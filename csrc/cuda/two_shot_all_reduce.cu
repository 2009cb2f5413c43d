// Large all_reduce: reduce_scatter and all_gather in one kernel, pipelined. The message is cut into
// tiles, one per channel and round, and each tile into a chunk for every rank to reduce. Three
// teams go through the rounds, each at its own pace:
//
//   push    (kInputs):             chunk p of this rank's tile -> queue of rank p
//   reduce  (kInputs -> kResults): own chunk and the peers', in rank order -> output, and all peers
//   collect (kResults):            the peers' reduced chunks -> output, unless they have landed
//   there
//
// Each link carries 2 (P - 1) / P of the message. push waits for the peers' reduce, that for push
// and collect, and collect for reduce alone: no circle.
#include "cuda/chunks.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

template <typename T, int kRanks>
DPT_KERNEL two_shot_all_reduce_kernel(DPT_PARAMETER GroupView group,
                                      DPT_PARAMETER CallView call,
                                      DPT_PARAMETER AllReduceArguments arguments,
                                      DPT_PARAMETER Cut cut) {
  DPT_SHARED(PipelineState<3>, state);
  const Attendance attendance(group, call);
  state.start();
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint32_t peers = all_peers(group);
  const Scale scale{arguments.input_factor, arguments.result_factor};
  using VectorReducer = Reducer<T, Sum, Vector>;

  // The start of the chunk that `owner` reduces.
  const auto offset = [&](uint32_t round, int owner) {
    const uint64_t tile = static_cast<uint64_t>(round) * num_channels() + channel_index();
    return (tile * size + owner) * cut.chunk;
  };
  const auto push = [&](const Team& team) {
    const Sender inputs(group, kInputs, state.ends, team);
    return team.run(
        cut.rounds,
        [&](uint32_t round) {
          team.split(size - 1, [&](int part, const WorkerGroup& workers) {
            const int peer = (rank + 1 + part) % size;
            const uint64_t at = offset(round, peer);
            push_scaled_chunk<VectorReducer>(
                workers, arguments.input + at, cut.bytes_at(at), inputs.slot(peer, round), scale);
          });
        },
        SignalWarp{[&](uint32_t round) { return inputs.has_room(round, peers); },
                   [&](uint32_t round) { inputs.publish(round, peers); },
                   [&] { inputs.close(cut.rounds); }});
  };

  const auto reduce = [&](const Team& team) {
    const Receiver inputs(group, kInputs, state.ends, team);
    const Sender results(group, kResults, state.ends, team);
    return team.run(
        cut.rounds,
        [&](uint32_t round) {
          const uint64_t at = offset(round, rank);
          const Places<kRanks> places(group, results, round, at);
          reduce_chunk<VectorReducer, kRanks>(
              team.workers(),
              group,
              [&](int source) { return inputs.slot(source, round); },
              {arguments.input + at, arguments.output + at, cut.bytes_at(at), scale},
              [&](uint32_t i, const Vector& result, uint64_t left) {
                places.store(i, result, left);
              });
        },
        SignalWarp{[&](uint32_t round) {
                     return inputs.has_come(round, peers) && results.has_room(round, peers);
                   },
                   [&](uint32_t round) {
                     results.publish(round, peers);
                     inputs.release(round, peers);
                   },
                   [&] {
                     inputs.close(cut.rounds);
                     results.close(cut.rounds);
                   }});
  };

  const auto collect = [&](const Team& team) {
    const Receiver results(group, kResults, state.ends, team);
    if (cut.rounds != 0) results.announce(call, arguments.output);
    return team.run(
        cut.rounds,
        [&](uint32_t round) {
          team.split(size - 1, [&](int part, const WorkerGroup& workers) {
            const int source = (rank + size - 1 - part) % size;
            if (results.has_landed(source, round)) return;
            const uint64_t at = offset(round, source);
            collect_chunk(
                workers, results.slot(source, round), cut.bytes_at(at), arguments.output + at);
          });
        },
        SignalWarp{[&](uint32_t round) { return results.has_come(round, peers); },
                   [&](uint32_t round) { results.release(round, peers); },
                   [&] { results.close(cut.rounds); }});
  };

  const int quarter = num_threads() / kWarp / 4;
  const Team pushers(group, call, 0, quarter, state.progress[0]);
  const Team reducers(group, call, quarter, 2 * quarter, state.progress[1]);
  const Team collectors(group, call, 3 * quarter, quarter, state.progress[2]);
  bool ok = true;
  if (pushers.has_me()) ok = push(pushers);
  if (reducers.has_me()) ok = reduce(reducers);
  if (collectors.has_me()) ok = collect(collectors);
  attendance.end(ok);
}

}  // namespace

void two_shot_all_reduce(const Launch& launch,
                         const AllReduceArguments& arguments,
                         DataType dtype,
                         ReduceOp op) {
  DPT_CHECK(has_large_kernels(dtype, op));
  const auto size = static_cast<uint64_t>(launch.group.layout.size);
  visit_large(dtype, launch.group, [&](auto element, auto ranks) {
    start(two_shot_all_reduce_kernel<decltype(element), ranks>,
          launch,
          launch.group,
          launch.call,
          arguments,
          launch.cut(arguments.bytes, size));
  });
}

void load_two_shot_all_reduce() {
  for_each_large(
      [](auto element, auto ranks) { load(two_shot_all_reduce_kernel<decltype(element), ranks>); });
}

}  // namespace dpt::cuda
