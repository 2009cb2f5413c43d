// Large all_reduce: reduce_scatter and all_gather in one kernel, pipelined. The message is cut into
// tiles, one per channel and round, and each tile into a chunk for every rank to reduce.
//
//   push    (kInputs):   chunk p of this rank's tile -> queue of rank p
//   reduce  (kResults):  own chunk and the peers', in rank order -> output, and queues of all peers
//   collect:             the peers' reduced chunks -> output
//
//   round t:  push t + 1, reduce t, collect t - 1
//
// Each link carries 2 (P - 1) / P of the message. No step waits for a later one of any rank, so the
// ranks cannot wait for each other in a circle.
#include "cuda/reduce_chunks.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

template <typename T>
DPT_KERNEL two_shot_all_reduce_kernel(DPT_PARAMETER GroupView group,
                                      DPT_PARAMETER CallView call,
                                      DPT_PARAMETER AllReduceArguments arguments) {
  DPT_SHARED(ChannelShared, shared);
  Attendance attendance;
  if (!attendance.begin(group, call)) return;
  Channel channel(group, call, shared);
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint32_t peers = channel.all_peers();
  const Scale scale{arguments.input_factor, arguments.result_factor};
  using VectorReducer = Reducer<T, Sum, Vector>;

  const uint64_t chunks = static_cast<uint64_t>(num_channels()) * size;  // of a round
  const uint64_t most = chunks * group.layout.slot_bytes;
  const uint64_t rounds = (arguments.bytes + most - 1) / most;
  const uint64_t share = (arguments.bytes + rounds * chunks - 1) / (rounds * chunks);
  const uint64_t chunk = (share + 15) / 16 * 16;
  // Of the chunk that `owner` reduces.
  const auto offset = [&](uint64_t round, int owner) {
    return ((round * num_channels() + channel_index()) * size + owner) * chunk;
  };
  const auto valid_bytes = [&](uint64_t at) {
    if (at >= arguments.bytes) return uint64_t{0};
    return arguments.bytes - at < chunk ? arguments.bytes - at : chunk;
  };
  const auto own = [&](uint64_t at, uint64_t valid) {
    return VectorReducer::scale_input(load_user<Vector>(arguments.input + at, valid), scale);
  };

  const auto push = [&](uint64_t round) {
    if (round >= rounds) return true;
    if (!channel.reserve(kInputs, peers)) return false;
    for (uint64_t i = thread_index(); i * 16 < chunk; i += num_threads()) {
      Vector parts[kMaxRanks];
#pragma unroll
      for (int step = 1; step < kMaxRanks; ++step) {
        if (step >= size) continue;
        const uint64_t at = offset(round, (rank + step) % size);
        const uint64_t valid = valid_bytes(at);
        if (i * 16 < valid) parts[step] = own(at + i * 16, valid - i * 16);
      }
#pragma unroll
      for (int step = 1; step < kMaxRanks; ++step) {
        if (step >= size) continue;
        const int peer = (rank + step) % size;
        if (i * 16 < valid_bytes(offset(round, peer))) {
          channel.outgoing(kInputs, peer)[i] = to_uint4(parts[step]);
        }
      }
    }
    channel.publish(kInputs, peers);
    return true;
  };

  const auto reduce = [&](uint64_t round) {
    if (!channel.await(kInputs, peers) || !channel.reserve(kResults, peers)) return false;
    const uint64_t at = offset(round, rank);
    const uint64_t valid = valid_bytes(at);
    for (uint64_t i = thread_index(); i * 16 < valid; i += num_threads()) {
      const Vector input = own(at + i * 16, valid - i * 16);
      const Vector result = reduce_incoming<VectorReducer>(channel, group, i, input, scale);
#pragma unroll
      for (int step = 1; step < kMaxRanks; ++step) {
        if (step < size) channel.outgoing(kResults, (rank + step) % size)[i] = to_uint4(result);
      }
      store_user(arguments.output + at + i * 16, result, valid - i * 16);
    }
    channel.publish(kResults, peers);
    channel.release(kInputs, peers);
    return true;
  };

  const auto collect = [&](uint64_t round) {
    if (!channel.await(kResults, peers)) return false;
    for (int step = 1; step < size; ++step) {
      const int source = (rank + step) % size;
      const uint64_t at = offset(round, source);
      const uint64_t valid = valid_bytes(at);
      const uint4* from = channel.incoming(kResults, source);
      for (uint64_t i = thread_index(); i * 16 < valid; i += num_threads()) {
        store_user(
            arguments.output + at + i * 16, to_vector(load_staged(from + i)), valid - i * 16);
      }
    }
    channel.release(kResults, peers);
    return true;
  };

  if (!push(0)) return;
  for (uint64_t round = 0; round < rounds; ++round) {
    if (!push(round + 1) || !reduce(round)) return;
    if (round > 0 && !collect(round - 1)) return;
  }
  if (!collect(rounds - 1)) return;
  channel.close();
  attendance.end(group, call);
}

}  // namespace

void two_shot_all_reduce(const Launch& launch,
                         const AllReduceArguments& arguments,
                         DataType dtype,
                         ReduceOp op) {
  DPT_CHECK(has_large_kernels(dtype, op));
  visit_large_dtype(dtype, [&](auto element) {
    start(two_shot_all_reduce_kernel<decltype(element)>,
          launch,
          launch.group,
          launch.call,
          arguments);
  });
}

void load_two_shot_all_reduce() {
  for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16, DPT_FLOAT16}) {
    visit_large_dtype(dtype,
                      [](auto element) { load(two_shot_all_reduce_kernel<decltype(element)>); });
  }
}

}  // namespace dpt::cuda
