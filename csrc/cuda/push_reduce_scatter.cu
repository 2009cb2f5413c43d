// Large reduce_scatter: every rank pushes each peer's part into that peer's queue, chunk by chunk,
// and adds up its own part with what the peers pushed.
//
//   round t:  push chunk t + 1 of every peer's part, then reduce chunk t of the own part -> output
//
// The own part never leaves the GPU: each link carries (P - 1) / P of the input, once.
#include "cuda/reduce_chunks.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

template <typename T>
DPT_KERNEL push_reduce_scatter_kernel(DPT_PARAMETER GroupView group,
                                      DPT_PARAMETER CallView call,
                                      DPT_PARAMETER ReduceArguments arguments) {
  DPT_SHARED(ChannelShared, shared);
  Attendance attendance;
  if (!attendance.begin(group, call)) return;
  Channel channel(group, call, shared);
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint32_t peers = channel.all_peers();
  const Scale scale{arguments.input_factor, arguments.result_factor};
  using VectorReducer = Reducer<T, Sum, Vector>;

  const uint64_t channels = num_channels();
  const uint64_t most = channels * group.layout.slot_bytes;
  const uint64_t rounds = (arguments.bytes + most - 1) / most;
  const uint64_t share = (arguments.bytes + rounds * channels - 1) / (rounds * channels);
  const uint64_t chunk = (share + 15) / 16 * 16;
  const auto offset = [&](uint64_t round) { return (round * channels + channel_index()) * chunk; };
  const auto valid_bytes = [&](uint64_t round) {
    const uint64_t at = offset(round);
    if (at >= arguments.bytes) return uint64_t{0};
    return arguments.bytes - at < chunk ? arguments.bytes - at : chunk;
  };
  const auto own = [&](int part, uint64_t at, uint64_t valid) {
    return VectorReducer::scale_input(load_user<Vector>(arguments.parts[part] + at, valid), scale);
  };

  const auto push = [&](uint64_t round) {
    if (round >= rounds) return true;
    if (!channel.reserve(kInputs, peers)) return false;
    const uint64_t at = offset(round);
    const uint64_t valid = valid_bytes(round);
    for (uint64_t i = thread_index(); i * 16 < valid; i += num_threads()) {
      Vector parts[kMaxRanks];
#pragma unroll
      for (int step = 1; step < kMaxRanks; ++step) {
        if (step < size) parts[step] = own((rank + step) % size, at + i * 16, valid - i * 16);
      }
#pragma unroll
      for (int step = 1; step < kMaxRanks; ++step) {
        if (step < size) {
          channel.outgoing(kInputs, (rank + step) % size)[i] = to_uint4(parts[step]);
        }
      }
    }
    channel.publish(kInputs, peers);
    return true;
  };

  const auto reduce = [&](uint64_t round) {
    if (!channel.await(kInputs, peers)) return false;
    const uint64_t at = offset(round);
    const uint64_t valid = valid_bytes(round);
    for (uint64_t i = thread_index(); i * 16 < valid; i += num_threads()) {
      const Vector input = own(rank, at + i * 16, valid - i * 16);
      const Vector result = reduce_incoming<VectorReducer>(channel, group, i, input, scale);
      store_user(arguments.output + at + i * 16, result, valid - i * 16);
    }
    channel.release(kInputs, peers);
    return true;
  };

  if (!push(0)) return;
  for (uint64_t round = 0; round < rounds; ++round) {
    if (!push(round + 1)) return;
    if (!reduce(round)) return;
  }
  channel.close();
  attendance.end(group, call);
}

}  // namespace

void push_reduce_scatter(const Launch& launch,
                         const ReduceArguments& arguments,
                         DataType dtype,
                         ReduceOp op) {
  DPT_CHECK(has_large_kernels(dtype, op));
  visit_large_dtype(dtype, [&](auto element) {
    start(push_reduce_scatter_kernel<decltype(element)>,
          launch,
          launch.group,
          launch.call,
          arguments);
  });
}

void load_push_reduce_scatter() {
  for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16, DPT_FLOAT16}) {
    visit_large_dtype(dtype,
                      [](auto element) { load(push_reduce_scatter_kernel<decltype(element)>); });
  }
}

}  // namespace dpt::cuda
