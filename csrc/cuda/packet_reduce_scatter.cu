// Middle-sized reduce_scatter in one trip of packets:
//
//   send:    every peer's part -> packets
//   reduce:  own part and the peers' packets, in rank order -> output
#include "cuda/packets.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

template <typename T, int kRanks, bool kPlain>
DPT_DEVICE void run(const GroupView& group,
                    const CallView& call,
                    const ReduceArguments& arguments) {
  const Attendance attendance(group, call);
  const int size = group.layout.size;
  const int rank = group.rank;
  const Scale scale{arguments.input_factor, arguments.result_factor};
  using VectorReducer = Reducer<T, Sum, Vector>;
  const auto own = [&](int part, uint32_t packet) {
    return scale_share<VectorReducer>(
        load_share<kPlain>(arguments.parts[part], arguments.bytes, packet), scale);
  };
  const PacketLoop packets(arguments.bytes);
  const Packets inputs(group, call, kInputs);

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
    store_share(arguments.output,
                arguments.bytes,
                packet,
                reduce_shares<VectorReducer>(group, shares, mine, scale));
    return true;
  });
  if (attendance.end(ok)) inputs.close();
}

template <typename T, int kRanks>
DPT_KERNEL packet_reduce_scatter_kernel(DPT_PARAMETER GroupView group,
                                        DPT_PARAMETER CallView call,
                                        DPT_PARAMETER ReduceArguments arguments) {
  uint64_t addresses = 0;
  for (int part = 0; part < group.layout.size; ++part) {
    addresses |= address_of(arguments.parts[part]);
  }
  const bool plain = arguments.input_factor == 1 && addresses % Vector::kBytes == 0;
  if (plain) {
    run<T, kRanks, true>(group, call, arguments);
  } else {
    run<T, kRanks, false>(group, call, arguments);
  }
}

}  // namespace

void packet_reduce_scatter(const Launch& launch,
                           const ReduceArguments& arguments,
                           DataType dtype,
                           ReduceOp op) {
  DPT_CHECK(has_large_kernels(dtype, op));
  visit_large(dtype, launch.group, [&](auto element, auto ranks) {
    start(packet_reduce_scatter_kernel<decltype(element), ranks>,
          launch,
          launch.group,
          launch.call,
          arguments);
  });
}

void load_packet_reduce_scatter() {
  for_each_large([](auto element, auto ranks) {
    load(packet_reduce_scatter_kernel<decltype(element), ranks>);
  });
}

}  // namespace dpt::cuda
