// Large all_gather, all_to_all, broadcast, gather and scatter: each pair of ranks moves its part in
// chunks. Two teams, each at its own pace:
//
//   push:  chunk of every peer's part -> queue of that peer, or its output
//   take:  chunks of every peer -> output, unless they have landed there; own part -> output
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
  bool same;  // all ranks are sent the same part
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

template <int kRanks>
DPT_KERNEL push_exchange_kernel(DPT_PARAMETER GroupView group,
                                DPT_PARAMETER CallView call,
                                DPT_PARAMETER ExchangeArguments arguments,
                                DPT_PARAMETER Cuts cuts) {
  DPT_SHARED(PipelineState<2>, state);
  const Attendance attendance(group, call);
  state.start();
  const int size = group.layout.size;
  const int rank = group.rank;
  const bool copies = arguments.send[rank] != arguments.receive[rank];

  const auto push = [&](const Team& team) {
    const Sender parts(group, kInputs, state.ends, team);
    const auto peers_in = [&](uint32_t round) { return in_round(cuts.send, group, round); };
    return team.run(
        most_rounds(cuts.send, size),
        [&](uint32_t round) {
          const uint32_t peers = peers_in(round);
          if (cuts.same) {
            const ChunkOf chunk(cuts.send[rank]);
            const uint64_t at = chunk.offset(round);
            push_chunk_to_all<kRanks>(team.workers(),
                                      arguments.send[rank] + at,
                                      chunk.bytes(round),
                                      {group, parts, round, at});
            return;
          }
          team.split(size - 1, [&](int part, const WorkerGroup& workers) {
            const int peer = (rank + 1 + part) % size;
            if (!has_peer(peers, peer)) return;
            const ChunkOf chunk(cuts.send[peer]);
            const uint64_t at = chunk.offset(round);
            push_chunk(workers,
                       arguments.send[peer] + at,
                       chunk.bytes(round),
                       parts.place(peer, round, at),
                       parts.lands(peer, round));
          });
        },
        SignalWarp{[&](uint32_t round) { return parts.has_room(round, peers_in(round)); },
                   [&](uint32_t round) { parts.publish(round, peers_in(round)); },
                   [&] {
                     if (parts.kept() >= 0) parts.close(cuts.send[parts.kept()].rounds);
                   }});
  };

  const auto take = [&](const Team& team) {
    const Receiver parts(group, kInputs, state.ends, team);
    const auto peers_in = [&](uint32_t round) { return in_round(cuts.receive, group, round); };
    if (has_peer(peers_in(0), parts.kept())) parts.announce(call, arguments.receive[parts.kept()]);
    return team.run(
        most_rounds(cuts.receive, size),
        [&](uint32_t round) {
          const uint32_t peers = peers_in(round);
          // The last part is this rank's own.
          team.split(copies ? size : size - 1, [&](int part, const WorkerGroup& workers) {
            const int source = (rank + 1 + part) % size;
            const ChunkOf chunk(cuts.receive[source]);
            char* const output = arguments.receive[source] + chunk.offset(round);
            if (source == rank) {
              const char* const input = arguments.send[rank] + chunk.offset(round);
              copy_chunk(workers, input, chunk.bytes(round), output);
            } else if (has_peer(peers, source) && !parts.has_landed(source, round)) {
              collect_chunk(workers, parts.slot(source, round), chunk.bytes(round), output);
            }
          });
        },
        SignalWarp{[&](uint32_t round) { return parts.has_come(round, peers_in(round)); },
                   [&](uint32_t round) { parts.release(round, peers_in(round)); },
                   [&] {
                     if (parts.kept() >= 0) parts.close(cuts.receive[parts.kept()].rounds);
                   }});
  };

  // The other team has an own part beside the peers'.
  const int warps = num_threads() / kWarp;
  const int some = warps * 7 / 16;
  const Team pushers(group, call, 0, some, state.progress[0]);
  const Team takers(group, call, some, warps - some, state.progress[1]);
  bool ok = true;
  if (pushers.has_me()) ok = push(pushers);
  if (takers.has_me()) ok = take(takers);
  attendance.end(ok);
}

}  // namespace

void push_exchange(const Launch& launch, const ExchangeArguments& arguments) {
  const int size = launch.group.layout.size;
  Cuts cuts{};
  cuts.same = true;
  for (int part = 0; part < size; ++part) {
    cuts.send[part] = launch.cut(arguments.send_bytes[part]);
    cuts.receive[part] = launch.cut(arguments.receive_bytes[part]);
    cuts.same &= arguments.send[part] == arguments.send[0];
    cuts.same &= arguments.send_bytes[part] == arguments.send_bytes[0];
  }
  visit_ranks(size, [&](auto ranks) {
    start(push_exchange_kernel<ranks>, launch, launch.group, launch.call, arguments, cuts);
  });
}

void load_push_exchange() {
  for (const int size : {kFewRanks, kMaxRanks}) {
    visit_ranks(size, [](auto ranks) { load(push_exchange_kernel<ranks>); });
  }
}

}  // namespace dpt::cuda
