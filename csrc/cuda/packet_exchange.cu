// Middle-sized all_gather and all_to_all of equal parts, in one trip of packets:
//
//   send:     each peer's part -> packets of that peer
//   own:      this rank's own part is copied
//   receive:  packets of each peer -> output
#include "cuda/packets.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

template <int kRanks, bool kPlain>
DPT_DEVICE void run(const GroupView& group,
                    const CallView& call,
                    const ExchangeArguments& arguments) {
  const Attendance attendance(group, call);
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint64_t bytes = arguments.send_bytes[rank];
  const PacketLoop packets(bytes);
  const Packets parts(group, call, kInputs);
  const bool copies = arguments.send[rank] != arguments.receive[rank];

  bool ok = warp_and(attendance.is_alive());
  ok = ok && packets.each([&](uint32_t packet, uint32_t index) {
    Share shares[kRanks];
#pragma unroll
    for (int step = 0; step < kRanks; ++step) {
      if (step >= size) continue;
      shares[step] = load_share<kPlain>(arguments.send[(rank + step) % size], bytes, packet);
    }
#pragma unroll
    for (int step = 1; step < kRanks; ++step) {
      if (step < size) parts.send((rank + step) % size, index, shares[step]);
    }
    if (copies) store_share(arguments.receive[rank], bytes, packet, shares[0]);
    return true;
  });
  ok = ok && packets.each([&](uint32_t packet, uint32_t index) {
    Share shares[kRanks];
    if (!parts.receive(index, shares)) return false;
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source >= size || source == rank) continue;
      store_share(arguments.receive[source], bytes, packet, shares[source]);
    }
    return true;
  });
  if (attendance.end(ok)) parts.close();
}

template <int kRanks>
DPT_KERNEL packet_exchange_kernel(DPT_PARAMETER GroupView group,
                                  DPT_PARAMETER CallView call,
                                  DPT_PARAMETER ExchangeArguments arguments) {
  uint64_t addresses = 0;
  for (int part = 0; part < group.layout.size; ++part) {
    addresses |= address_of(arguments.send[part]);
  }
  const bool plain = addresses % Vector::kBytes == 0;
  if (plain) {
    run<kRanks, true>(group, call, arguments);
  } else {
    run<kRanks, false>(group, call, arguments);
  }
}

}  // namespace

void packet_exchange(const Launch& launch, const ExchangeArguments& arguments) {
  visit_ranks(launch.group.layout.size, [&](auto ranks) {
    start(packet_exchange_kernel<ranks>, launch, launch.group, launch.call, arguments);
  });
}

void load_packet_exchange() {
  for (const int size : {kFewRanks, kMaxRanks}) {
    visit_ranks(size, [](auto ranks) { load(packet_exchange_kernel<ranks>); });
  }
}

}  // namespace dpt::cuda
