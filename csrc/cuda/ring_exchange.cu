// Large all_gather and broadcast round a ring of the ranks. What a rank has for all goes from each
// rank to the one after it, up to the last before its origin. A team for each origin:
//
//   relay:  chunk of the own part, or from the rank before
//           -> output, unless it has landed there, and the rank after
//
// Each link carries (P - 1) / P of what is gathered, as when everyone pushes to everyone. But every
// GPU writes to one other and is written to by one: 353 GB/s over NVLink, where three at a time got
// 318 to 341. The price is that a chunk passes P - 1 links one after the other. A relay waits for
// those of the same origin alone, which end before they reach it: no circle.
#include "cuda/chunks.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

DPT_KERNEL ring_exchange_kernel(DPT_PARAMETER GroupView group,
                                DPT_PARAMETER CallView call,
                                DPT_PARAMETER RingArguments arguments,
                                DPT_PARAMETER Cut cut) {
  DPT_SHARED(PipelineState<kMaxRanks>, state);
  const Attendance attendance(group, call);
  state.start();
  const int size = group.layout.size;
  const ChunkOf chunk(cut);

  const auto relay = [&](const Team& team, int origin) {
    const int links = (group.rank + size - origin) % size;  // behind it
    const bool begins = links == 0;
    const bool ends = links == size - 1;
    const RingLinks ring{origin};
    const Receiver before(group, kRing, state.ends, team, ring);
    const Sender after(group, kRing, state.ends, team, ring);
    const uint32_t from = begins ? 0 : 1u << origin;
    const uint32_t to = ends ? 0 : 1u << origin;
    char* const output = arguments.output[origin];
    const bool keeps = !begins || output != arguments.input;
    if (!begins && cut.rounds != 0) before.announce(call, output);
    return team.run(
        cut.rounds,
        [&](uint32_t round) {
          const uint64_t at = chunk.offset(round);
          Hop hop{};
          hop.output = keeps ? output + at : nullptr;
          hop.bytes = chunk.bytes(round);
          if (!ends) {
            hop.next = after.place(origin, round, at);
            hop.lands = after.lands(origin, round);
          }
          if (begins) {
            hop.from = arguments.input + at;
            return relay_chunk<true>(team.workers(), hop);
          }
          hop.from = before.slot(origin, round);
          hop.has_landed = before.has_landed(origin, round);
          if (hop.has_landed) {
            hop.from = hop.output;
            hop.output = nullptr;
          }
          // If it has landed with its last rank, there is nothing left to do.
          if (hop.next != nullptr || hop.output != nullptr) relay_chunk<false>(team.workers(), hop);
        },
        SignalWarp{[&](uint32_t round) {
                     return before.has_come(round, from) && after.has_room(round, to);
                   },
                   [&](uint32_t round) {
                     after.publish(round, to);
                     before.release(round, from);
                   },
                   [&] {
                     before.close(begins ? 0 : cut.rounds);
                     after.close(ends ? 0 : cut.rounds);
                   }});
  };

  const int warps = num_threads() / kWarp / arguments.num_origins;
  bool ok = true;
  for (int i = 0; i < arguments.num_origins; ++i) {
    const Team team(group, call, i * warps, warps, state.progress[i]);
    if (team.has_me()) ok = relay(team, (arguments.first_origin + i) % size);
  }
  attendance.end(ok);
}

}  // namespace

void ring_exchange(const Launch& launch, const RingArguments& arguments) {
  start(ring_exchange_kernel,
        launch,
        launch.group,
        launch.call,
        arguments,
        launch.cut(arguments.bytes));
}

void load_ring_exchange() { load(ring_exchange_kernel); }

}  // namespace dpt::cuda
