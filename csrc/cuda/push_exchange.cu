// Large all_gather, all_to_all, broadcast, gather and scatter: each pair of ranks moves its part in
// chunks, which the sender pushes into the receiver's queue and the receiver copies to the output.
//
//   round t:  push chunk t + 1 of every peer's part, then copy chunk t of every peer's
//   own:      this rank's own part is copied meanwhile
//
// No round waits for a later one of any rank, so the ranks cannot wait for each other in a circle.
#include "cuda/channel.cuh"
#include "cuda/start.cuh"
#include "cuda/vectors.cuh"

namespace dpt::cuda {
namespace {

// How one part of `bytes` is cut, on both sides alike: in every round each channel moves a chunk.
struct Cut {
  uint64_t bytes;
  uint64_t chunk;  // bytes
  uint32_t rounds;

  DPT_DEVICE static Cut of(uint64_t bytes, uint32_t slot_bytes) {
    const uint64_t channels = num_channels();
    const uint64_t most = channels * slot_bytes;
    const uint64_t rounds = (bytes + most - 1) / most;
    if (rounds == 0) return {0, 0, 0};
    const uint64_t chunk = (bytes + rounds * channels - 1) / (rounds * channels);
    return {bytes, (chunk + 15) / 16 * 16, static_cast<uint32_t>(rounds)};
  }
  DPT_DEVICE uint64_t offset(uint32_t round) const {
    return (static_cast<uint64_t>(round) * num_channels() + channel_index()) * chunk;
  }
  // Of this channel's chunk.
  DPT_DEVICE uint64_t valid(uint32_t round) const {
    const uint64_t at = offset(round);
    if (at >= bytes) return 0;
    return bytes - at < chunk ? bytes - at : chunk;
  }
};

DPT_KERNEL push_exchange_kernel(DPT_PARAMETER GroupView group,
                                DPT_PARAMETER CallView call,
                                DPT_PARAMETER ExchangeArguments arguments) {
  DPT_SHARED(ChannelShared, shared);
  Attendance attendance;
  if (!attendance.begin(group, call)) return;
  Channel channel(group, call, shared);
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint32_t slot_bytes = group.layout.slot_bytes;

  // Of the parts with a chunk in a round, as bits.
  const auto in_round = [&](const uint64_t* bytes, uint32_t round) {
    uint32_t peers = 0;
    for (int peer = 0; peer < size; ++peer) {
      if (peer != rank && Cut::of(bytes[peer], slot_bytes).rounds > round) peers |= 1u << peer;
    }
    return peers;
  };

  const auto push = [&](uint32_t round) {
    const uint32_t peers = in_round(arguments.send_bytes, round);
    if (peers == 0) return true;
    if (!channel.reserve(kInputs, peers)) return false;
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;
      if ((peers >> peer & 1) == 0) continue;
      const Cut cut = Cut::of(arguments.send_bytes[peer], slot_bytes);
      const char* from = arguments.send[peer] + cut.offset(round);
      uint4* to = channel.outgoing(kInputs, peer);
      const uint64_t valid = cut.valid(round);
      for (uint64_t i = thread_index(); i * 16 < valid; i += num_threads()) {
        to[i] = to_uint4(load_user<Vector>(from + i * 16, valid - i * 16));
      }
    }
    channel.publish(kInputs, peers);
    return true;
  };

  const auto take = [&](uint32_t round) {
    const uint32_t peers = in_round(arguments.receive_bytes, round);
    if (peers == 0) return true;
    if (!channel.await(kInputs, peers)) return false;
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + size - step) % size;
      if ((peers >> peer & 1) == 0) continue;
      const Cut cut = Cut::of(arguments.receive_bytes[peer], slot_bytes);
      char* to = arguments.receive[peer] + cut.offset(round);
      const uint4* from = channel.incoming(kInputs, peer);
      const uint64_t valid = cut.valid(round);
      for (uint64_t i = thread_index(); i * 16 < valid; i += num_threads()) {
        store_user(to + i * 16, to_vector(load_staged(from + i)), valid - i * 16);
      }
    }
    channel.release(kInputs, peers);
    return true;
  };

  const auto copy_own = [&](uint32_t round) {
    if (arguments.send[rank] == arguments.receive[rank]) return;
    const Cut cut = Cut::of(arguments.receive_bytes[rank], slot_bytes);
    if (round >= cut.rounds) return;
    const uint64_t at = cut.offset(round);
    const uint64_t valid = cut.valid(round);
    for (uint64_t i = thread_index(); i * 16 < valid; i += num_threads()) {
      const uint64_t left = valid - i * 16;
      store_user(arguments.receive[rank] + at + i * 16,
                 load_user<Vector>(arguments.send[rank] + at + i * 16, left),
                 left);
    }
  };

  uint32_t rounds = 0;
  for (int part = 0; part < size; ++part) {
    const uint32_t out = Cut::of(arguments.send_bytes[part], slot_bytes).rounds;
    const uint32_t in = Cut::of(arguments.receive_bytes[part], slot_bytes).rounds;
    rounds = rounds > out ? rounds : out;
    rounds = rounds > in ? rounds : in;
  }
  if (!push(0)) return;
  for (uint32_t round = 0; round < rounds; ++round) {
    if (!push(round + 1)) return;
    copy_own(round);
    if (!take(round)) return;
  }
  channel.close();
  attendance.end(group, call);
}

}  // namespace

void push_exchange(const Launch& launch, const ExchangeArguments& arguments) {
  start(push_exchange_kernel, launch, launch.group, launch.call, arguments);
}

void load_push_exchange() { load(push_exchange_kernel); }

}  // namespace dpt::cuda
