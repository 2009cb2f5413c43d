// Large all_gather, all_to_all, broadcast, gather and scatter: each pair of ranks moves its part in
// chunks. Two teams, each at its own pace:
//
//   push:  chunk of every peer's part -> queue of that peer
//   take:  chunk of this rank's own part -> output; chunks of every peer -> output
//
// push waits for the peers' take, and take for push alone: no circle.
#include "cuda/chunks.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

// How each part is cut, on both sides of a pair alike.
struct Cuts {
  Cut send[kMaxRanks];
  Cut receive[kMaxRanks];
};

DPT_DEVICE uint32_t most_rounds(const Cut* cuts, int size) {
  uint32_t most = 0;
  for (int part = 0; part < size; ++part)
    most = most < cuts[part].rounds ? cuts[part].rounds : most;
  return most;
}
// The peers with a chunk in this round, as bits.
DPT_DEVICE uint32_t in_round(const Cut* cuts, const GroupView& group, uint32_t round) {
  uint32_t parts = 0;
  for (int part = 0; part < group.layout.size; ++part) {
    if (cuts[part].rounds > round) parts |= 1u << part;
  }
  return parts & all_peers(group);
}

DPT_KERNEL push_exchange_kernel(DPT_PARAMETER GroupView group,
                                DPT_PARAMETER CallView call,
                                DPT_PARAMETER ExchangeArguments arguments,
                                DPT_PARAMETER Cuts cuts) {
  DPT_SHARED(QueueEnds, ends);
  Attendance attendance;
  if (!attendance.begin(group, call)) return;
  const int size = group.layout.size;
  const int rank = group.rank;

  const auto push = [&](const Team& team) {
    Sender parts(group, call, team, kInputs, ends);
    const uint32_t rounds = most_rounds(cuts.send, size);
    for (uint32_t round = 0; round < rounds; ++round) {
      const uint32_t peers = in_round(cuts.send, group, round);
      if (!parts.reserve(peers)) return false;
      for (int step = 1; step < size; ++step) {
        const int peer = (rank + step) % size;
        if ((peers >> peer & 1) == 0) continue;
        const ChunkOf chunk(cuts.send[peer]);
        push_chunk(
            team, arguments.send[peer] + chunk.offset(round), chunk.bytes(round), parts.slot(peer));
      }
      parts.publish(peers);
    }
    parts.close();
    return true;
  };

  const auto copy_own = [&](const Team& team, uint32_t round) {
    const Cut& cut = cuts.receive[rank];
    if (round >= cut.rounds || arguments.send[rank] == arguments.receive[rank]) return;
    const ChunkOf chunk(cut);
    const uint64_t at = chunk.offset(round);
    copy_chunk(team, arguments.send[rank] + at, chunk.bytes(round), arguments.receive[rank] + at);
  };

  const auto take = [&](const Team& team) {
    Receiver parts(group, call, team, kInputs, ends);
    const uint32_t rounds = most_rounds(cuts.receive, size);
    for (uint32_t round = 0; round < rounds; ++round) {
      copy_own(team, round);
      const uint32_t peers = in_round(cuts.receive, group, round);
      if (!parts.await(peers)) return false;
      for (int step = 1; step < size; ++step) {
        const int peer = (rank + size - step) % size;
        if ((peers >> peer & 1) == 0) continue;
        const ChunkOf chunk(cuts.receive[peer]);
        collect_chunk(team,
                      parts.slot(peer),
                      chunk.bytes(round),
                      arguments.receive[peer] + chunk.offset(round));
      }
      parts.release(peers);
    }
    parts.close();
    return true;
  };

  const int half = num_threads() / 2;
  const Team pushers(1, 0, half);
  const Team takers(2, half, half);
  const bool ok = pushers.has_me() ? push(pushers) : take(takers);
  if (sync_channel_and(ok)) attendance.end(group, call);
}

}  // namespace

void push_exchange(const Launch& launch, const ExchangeArguments& arguments) {
  Cuts cuts{};
  for (int part = 0; part < launch.group.layout.size; ++part) {
    cuts.send[part] = launch.cut(arguments.send_bytes[part]);
    cuts.receive[part] = launch.cut(arguments.receive_bytes[part]);
  }
  start(push_exchange_kernel, launch, launch.group, launch.call, arguments, cuts);
}

void load_push_exchange() { load(push_exchange_kernel); }

}  // namespace dpt::cuda
