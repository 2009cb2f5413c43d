// Large all_reduce along spanning trees, for links that are unequal or not everywhere. The message
// is cut into tiles, one per channel and round, and each tile into a share for every rank. In a
// step one share of a tile goes its way; its tree has the rank of the same number for its root, and
// neighbours in no tree never touch each other's memory. Two teams go through the steps, each at
// its own pace:
//
//   up   (kInputs):   own chunk and the children's, in rank order -> parent, at the root -> output
//   down (kResults):  the parent's chunk, unless it has landed in the output already, at the root
//                     what the own up team left there -> output, and all children
//
// All ranks' teams take the steps in the same order, so no circle: take the first step that some
// team up has not done. All before it are done everywhere, so its queues are empty, and its chunks
// go from the leaves of its tree to the root. The same of the teams down, which wait for those up
// while those wait for none of them.
//
// Channels begin a round with different shares: so all trees' links are at work at a time. Sums of
// 16-bit floats are rounded on every hop, those of stars once, as in two_shot_all_reduce.
#include "cuda/chunks.cuh"
#include "cuda/start.cuh"
#include "cuda/trees/tree_all_reduce.hpp"

namespace dpt::cuda {
namespace {

// A step: one share of this channel's tile of a round.
class Steps {
 public:
  DPT_DEVICE Steps(int size, const Cut& cut) : size_(size), cut_(cut) {}
  DPT_DEVICE uint32_t number() const { return cut_.rounds * size_; }
  DPT_DEVICE uint32_t round(uint32_t step) const { return step / size_; }
  // Within its round.
  DPT_DEVICE int position(uint32_t step) const { return static_cast<int>(step % size_); }
  DPT_DEVICE int share_at(int position) const { return (position + channel_index()) % size_; }
  DPT_DEVICE int share(uint32_t step) const { return share_at(position(step)); }
  DPT_DEVICE uint64_t offset(uint32_t step) const {
    const uint64_t tile = static_cast<uint64_t>(round(step)) * num_channels() + channel_index();
    return (tile * size_ + share(step)) * cut_.chunk;
  }

 private:
  int size_;
  const Cut& cut_;
};

DPT_DEVICE uint32_t count_bits(uint32_t bits) {
  uint32_t count = 0;
  for (; bits != 0; bits &= bits - 1) ++count;
  return count;
}

// Steps of a round that concern a queue, as bits. There may be several, since trees share links.
struct QueueSteps {
  uint32_t positions;
  DPT_DEVICE uint32_t each_round() const { return count_bits(positions); }
  DPT_DEVICE bool has(const Steps& steps, uint32_t step) const {
    return (positions >> steps.position(step) & 1) != 0;
  }
  // How many of the kernel's chunks go through the queue before that of a step.
  DPT_DEVICE uint32_t before(const Steps& steps, uint32_t step) const {
    const uint32_t earlier = positions & ((1u << steps.position(step)) - 1);
    return steps.round(step) * each_round() + count_bits(earlier);
  }
};

// The part of the trees that concerns this rank.
class TreeLinks {
 public:
  DPT_DEVICE TreeLinks(const GroupView& group, const Trees& trees, const Steps& steps)
      : size_(group.layout.size), rank_(group.rank), trees_(trees), steps_(steps) {}

  DPT_DEVICE int parent(int share) const { return trees_.parent[share][rank_]; }
  DPT_DEVICE bool is_child(int share, int peer) const {
    return trees_.parent[share][peer] == rank_;
  }
  // Steps in which `peer` is this rank's parent, and its child; none of a peer that is none.
  DPT_DEVICE QueueSteps with_parent(int peer) const {
    return where([&](int share) { return parent(share) == peer; }, peer);
  }
  DPT_DEVICE QueueSteps with_child(int peer) const {
    return where([&](int share) { return is_child(share, peer); }, peer);
  }

 private:
  template <typename Holds>
  DPT_DEVICE QueueSteps where(Holds holds, int peer) const {
    uint32_t positions = 0;
    for (int position = 0; peer >= 0 && position < size_; ++position) {
      if (holds(steps_.share_at(position))) positions |= 1u << position;
    }
    return {positions};
  }

  int size_;
  int rank_;
  const Trees& trees_;
  const Steps& steps_;
};

// The channel's threads share this. The queue with peer p: chunks up to it as a parent and down
// from it, and the other way round.
struct TreeState {
  PipelineState<2> pipeline;
  QueueSteps with_parent[kMaxRanks];
  QueueSteps with_child[kMaxRanks];

  DPT_DEVICE void start(const GroupView& group, const TreeLinks& links) {
    if (const int peer = thread_index(); peer < group.layout.size) {
      with_parent[peer] = links.with_parent(peer);
      with_child[peer] = links.with_child(peer);
    }
    pipeline.start();
  }
};

// A chunk of this rank's on its way up.
struct UpChunk {
  const char* input;
  char* to;   // a slot of the parent's, or the root's output
  bool ends;  // the latter
  uint64_t bytes;
  Scale scale;
};

// Own input and the children's slots, nullptr where a rank is none, in rank order -> `own.to`.
template <typename VectorReducer, int kRanks>
DPT_DEVICE void sum_upwards(const WorkerGroup& workers,
                            int rank,
                            const uint4* const (&slots)[kRanks],
                            const UpChunk& own) {
  struct OneOfEach {
    Vector of[kRanks];
  };
  auto* const to = reinterpret_cast<uint4*>(own.to);
  const auto* const vectors = reinterpret_cast<const uint4*>(own.input);
  const auto sum = [&](const OneOfEach& each) {
    VectorReducer reducer;
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source == rank || slots[source] != nullptr) reducer.add(each.of[source]);
    }
    return reducer.result({});
  };
  const auto load_slots = [&](uint32_t i, const Vector& input, OneOfEach& each) {
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (source == rank) {
        each.of[source] = input;
      } else if (slots[source] != nullptr) {
        each.of[source] = to_vector(load_staged(slots[source] + i));
      }
    }
  };
  const bool scales = own.scale.input != 1;
  const uint32_t plain =
      scales ? 0 : num_plain(address_of(own.input) | address_of(own.to), own.bytes);
  for_each_vector<kReductionsAtOnce, OneOfEach>(
      workers,
      plain,
      [&](uint32_t i, OneOfEach& each) { load_slots(i, to_vector(vectors[i]), each); },
      [&](uint32_t i, const OneOfEach& each) { to[i] = to_uint4(sum(each)); });
  // The rest is not aligned, is scaled or ends within a vector.
  for (uint32_t i = plain + workers.thread; i < num_vectors(own.bytes); i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    const Vector input = load_user<Vector>(own.input + at, own.bytes - at);
    OneOfEach each;
    load_slots(i, VectorReducer::scale_input(input, own.scale), each);
    store_chunk(to + i, sum(each), own.bytes - at, own.ends);
  }
}

// The places of a chunk on its way down.
template <int kRanks>
struct DownChunk {
  const uint4* from;  // a slot in whole vectors, or this rank's output
  bool is_output;     // the latter
  char* output;
  uint4* next[kRanks];  // of each child; nullptr of any other rank
  uint32_t landings;    // of which children that is the output, as bits
  uint64_t bytes;
};

template <int kRanks>
DPT_DEVICE void pass_down(const WorkerGroup& workers, const DownChunk<kRanks>& chunk) {
  const uint32_t plain = num_plain(address_of(chunk.output), chunk.bytes);
  auto* const output = reinterpret_cast<uint4*>(chunk.output);
  for_each_vector<kCopiesAtOnce, uint4>(
      workers,
      plain,
      [&](uint32_t i, uint4& value) { value = load_staged(chunk.from + i); },
      [&](uint32_t i, const uint4& value) {
        if (!chunk.is_output) output[i] = value;
#pragma unroll
        for (int child = 0; child < kRanks; ++child) {
          if (chunk.next[child] != nullptr) chunk.next[child][i] = value;
        }
      });
  for (uint32_t i = plain + workers.thread; i < num_vectors(chunk.bytes);
       i += workers.num_threads) {
    const uint64_t at = uint64_t{i} * Vector::kBytes;
    const uint64_t left = chunk.bytes - at;
    const Vector value = chunk.is_output ? load_user<Vector>(chunk.output + at, left)
                                         : to_vector(load_staged(chunk.from + i));
    if (!chunk.is_output) store_user(chunk.output + at, value, left);
#pragma unroll
    for (int child = 0; child < kRanks; ++child) {
      if (chunk.next[child] == nullptr) continue;
      store_chunk(chunk.next[child] + i, value, left, has_peer(chunk.landings, child));
    }
  }
}

template <typename T, int kRanks>
DPT_KERNEL tree_all_reduce_kernel(DPT_PARAMETER GroupView group,
                                  DPT_PARAMETER CallView call,
                                  DPT_PARAMETER TreeArguments arguments,
                                  DPT_PARAMETER Cut cut) {
  DPT_SHARED(TreeState, state);
  const Attendance attendance(group, call);
  const int size = group.layout.size;
  const int rank = group.rank;
  const Steps steps(size, cut);
  const TreeLinks links(group, arguments.trees, steps);
  state.start(group, links);
  QueueEnds& ends = state.pipeline.ends;
  using VectorReducer = Reducer<T, Sum, Vector>;
  // Both factors to the input: sums of halves that are averaged then stay within their range.
  const Scale scale{arguments.input_factor * arguments.result_factor, 1};

  const int half = num_threads() / kWarp / 2;
  const Team adders(group, call, 0, half, state.pipeline.progress[0]);
  const Team passers(group, call, half, half, state.pipeline.progress[1]);

  const auto up = [&](const Team& team) {
    const Receiver below(group, kInputs, ends, team);
    const Sender above(group, kInputs, ends, team);
    const QueueSteps from = links.with_child(below.kept());
    const QueueSteps to = links.with_parent(above.kept());
    const auto active = [&](const QueueSteps& queue, uint32_t step) {
      return queue.has(steps, step) ? 1u << team.signal_peer() : 0;
    };
    return team.run(
        steps.number(),
        [&](uint32_t step) {
          const int share = steps.share(step);
          const int parent = links.parent(share);
          const uint64_t at = steps.offset(step);
          UpChunk own{arguments.input + at, nullptr, parent < 0, cut.bytes_at(at), scale};
          own.to = own.ends ? arguments.output + at
                            : reinterpret_cast<char*>(above.slot(
                                  parent, state.with_parent[parent].before(steps, step)));
          const uint4* slots[kRanks];
#pragma unroll
          for (int peer = 0; peer < kRanks; ++peer) {
            const bool adds = peer < size && links.is_child(share, peer);
            slots[peer] =
                adds ? below.slot(peer, state.with_child[peer].before(steps, step)) : nullptr;
          }
          sum_upwards<VectorReducer, kRanks>(team.workers(), rank, slots, own);
        },
        SignalWarp{[&](uint32_t step) {
                     return below.has_come(from.before(steps, step), active(from, step)) &&
                            above.has_room(to.before(steps, step), active(to, step));
                   },
                   [&](uint32_t step) {
                     above.publish(to.before(steps, step), active(to, step));
                     below.release(from.before(steps, step), active(from, step));
                   },
                   [&] {
                     below.close(cut.rounds * from.each_round());
                     above.close(cut.rounds * to.each_round());
                   }});
  };

  const auto down = [&](const Team& team) {
    const Receiver above(group, kResults, ends, team);
    const Sender below(group, kResults, ends, team);
    const QueueSteps from = links.with_parent(above.kept());
    const QueueSteps to = links.with_child(below.kept());
    const auto active = [&](const QueueSteps& queue, uint32_t step) {
      return queue.has(steps, step) ? 1u << team.signal_peer() : 0;
    };
    if (cut.rounds != 0 && from.positions != 0) above.announce(call, arguments.output);
    return team.run(
        steps.number(),
        [&](uint32_t step) {
          const int share = steps.share(step);
          const int parent = links.parent(share);
          const uint64_t at = steps.offset(step);
          DownChunk<kRanks> chunk{nullptr, true, arguments.output + at, {}, 0, cut.bytes_at(at)};
          if (parent >= 0) {
            const uint32_t number = state.with_parent[parent].before(steps, step);
            chunk.is_output = above.has_landed(parent, number);
            chunk.from = above.slot(parent, number);
          }
          if (chunk.is_output) chunk.from = reinterpret_cast<const uint4*>(chunk.output);
          bool moves = !chunk.is_output;  // else it is where it belongs, unless it goes on
#pragma unroll
          for (int peer = 0; peer < kRanks; ++peer) {
            if (peer >= size || !links.is_child(share, peer)) continue;
            moves = true;
            const uint32_t number = state.with_child[peer].before(steps, step);
            chunk.next[peer] = below.place(peer, number, at);
            if (below.lands(peer, number)) chunk.landings |= 1u << peer;
          }
          if (moves) pass_down(team.workers(), chunk);
        },
        SignalWarp{[&](uint32_t step) {
                     const bool is_root = links.parent(steps.share(step)) < 0;
                     // That has its children to wait for.
                     const bool asks = is_root && to.has(steps, step);
                     return (!asks || adders.did(step)) &&
                            above.has_come(from.before(steps, step), active(from, step)) &&
                            below.has_room(to.before(steps, step), active(to, step));
                   },
                   [&](uint32_t step) {
                     below.publish(to.before(steps, step), active(to, step));
                     above.release(from.before(steps, step), active(from, step));
                   },
                   [&] {
                     above.close(cut.rounds * from.each_round());
                     below.close(cut.rounds * to.each_round());
                   }});
  };

  bool ok = true;
  if (adders.has_me()) ok = up(adders);
  if (passers.has_me()) ok = down(passers);
  attendance.end(ok);
}

}  // namespace

void tree_all_reduce(const Launch& launch,
                     const TreeArguments& arguments,
                     DataType dtype,
                     ReduceOp op) {
  DPT_CHECK(has_large_kernels(dtype, op));
  const auto size = static_cast<uint64_t>(launch.group.layout.size);
  visit_large(dtype, launch.group, [&](auto element, auto ranks) {
    start(tree_all_reduce_kernel<decltype(element), ranks>,
          launch,
          launch.group,
          launch.call,
          arguments,
          launch.cut(arguments.bytes, size));
  });
}

void load_tree_all_reduce() {
  for_each_large(
      [](auto element, auto ranks) { load(tree_all_reduce_kernel<decltype(element), ranks>); });
}

}  // namespace dpt::cuda
