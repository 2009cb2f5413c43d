// Middle-sized all_reduce in two trips of packets. The message is cut into a part for every rank to
// reduce:
//
//   send:    every peer's part -> packets of the first trip
//   reduce:  own part and the peers' packets, in rank order -> output, and the second trip to all
//   collect: packets of the second trip -> output
//
// Each link carries 2 (P - 1) / P of the message, a fifteenth more with the packets' numbers.
#include "cuda/packets.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

template <typename T, int kRanks, bool kPlain>
DPT_DEVICE void run(const GroupView& group,
                    const CallView& call,
                    const AllReduceArguments& arguments) {
  const Attendance attendance(group, call);
  const int size = group.layout.size;
  const int rank = group.rank;
  const Scale scale{arguments.input_factor, arguments.result_factor};
  using VectorReducer = Reducer<T, Sum, Vector>;
  const uint64_t share = (arguments.bytes + size - 1) / size;
  const uint64_t part = (share + Vector::kBytes - 1) / Vector::kBytes * Vector::kBytes;
  const auto bytes_of = [&](int owner) -> uint64_t {
    const uint64_t at = owner * part;
    if (at >= arguments.bytes) return 0;
    return arguments.bytes - at < part ? arguments.bytes - at : part;
  };
  const auto own = [&](int owner, uint32_t packet) {
    return scale_share<VectorReducer>(
        load_share<kPlain>(arguments.input + owner * part, bytes_of(owner), packet), scale);
  };
  const PacketLoop packets(part);
  const Packets inputs(group, call, kInputs);
  const Packets results(group, call, kResults);

  bool ok = warp_and(attendance.is_alive());
  ok = ok && packets.each([&](uint32_t packet, uint32_t index) {
    Share shares[kRanks];
#pragma unroll
    for (int step = 1; step < kRanks; ++step) {
      if (step < size) shares[step] = own((rank + step) % size, packet);
    }
#pragma unroll
    for (int step = 1; step < kRanks; ++step) {
      if (step < size) inputs.send((rank + step) % size, index, shares[step]);
    }
    return true;
  });
  ok = ok && packets.each([&](uint32_t packet, uint32_t index) {
    const Share mine = own(rank, packet);
    Share shares[kRanks];
    if (!inputs.receive(index, shares)) return false;
    const Share result = reduce_shares<VectorReducer>(group, shares, mine, scale);
#pragma unroll
    for (int step = 1; step < kRanks; ++step) {
      if (step < size) results.send((rank + step) % size, index, result);
    }
    store_share(arguments.output + rank * part, bytes_of(rank), packet, result);
    return true;
  });
  ok = ok && packets.each([&](uint32_t packet, uint32_t index) {
    Share shares[kRanks];
    if (!results.receive(index, shares)) return false;
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source >= size || source == rank) continue;
      store_share(arguments.output + source * part, bytes_of(source), packet, shares[source]);
    }
    return true;
  });
  if (attendance.end(ok)) inputs.close();
}

template <typename T, int kRanks>
DPT_KERNEL packet_all_reduce_kernel(DPT_PARAMETER GroupView group,
                                    DPT_PARAMETER CallView call,
                                    DPT_PARAMETER AllReduceArguments arguments) {
  const bool plain =
      arguments.input_factor == 1 && address_of(arguments.input) % Vector::kBytes == 0;
  if (plain) {
    run<T, kRanks, true>(group, call, arguments);
  } else {
    run<T, kRanks, false>(group, call, arguments);
  }
}

}  // namespace

void packet_all_reduce(const Launch& launch,
                       const AllReduceArguments& arguments,
                       DataType dtype,
                       ReduceOp op) {
  DPT_CHECK(has_large_kernels(dtype, op));
  visit_large(dtype, launch.group, [&](auto element, auto ranks) {
    start(packet_all_reduce_kernel<decltype(element), ranks>,
          launch,
          launch.group,
          launch.call,
          arguments);
  });
}

void load_packet_all_reduce() {
  for_each_large(
      [](auto element, auto ranks) { load(packet_all_reduce_kernel<decltype(element), ranks>); });
}

}  // namespace dpt::cuda
