// Exchange: all_gather, broadcast, gather, scatter and all_to_all, with parts of any size.
//
// All of them move a block from each source to each receiver. A source cuts its slot into lanes:
// one that all receivers read (all_gather, broadcast, gather), or one per receiver (scatter,
// all_to_all). In step t every source copies piece t of its blocks into its lanes. Meanwhile every
// receiver copies piece t-1 out of the lanes. Each step has one barrier. Blocks that lie in
// registered memory stay where they are and receivers copy them from there.
#include <algorithm>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

// Longest copy between two looks at the abort word.
constexpr size_t kCopiedBytes = 1 << 20;

class Exchange {
 public:
  explicit Exchange(const RunContext& context) : context_(context) {
    if (shares_lane()) {
      num_inputs_ = sends(context.me()) ? 1 : 0;
      lane_bytes_ = context.plan.chunk_bytes;
    } else {
      num_inputs_ = sends(context.me()) ? context.size() : 0;
      lane_bytes_ = lane_bytes_of(context.plan.chunk_bytes, context.size() - 1);
    }
    for (int index = 0; index < num_inputs_; ++index) {
      const size_t bytes = operation_.input_bytes(index);
      const bool stays = !shares_lane() && index == context.me();
      staged_.push_back(!stays && !segment_.offset_of(operation_.inputs[index], bytes));
      if (staged_.back()) {
        num_steps_ = std::max(num_steps_, (bytes + lane_bytes_ - 1) / lane_bytes_);
      }
    }
  }

  void run() {
    copy_in(0);
    const Entered entered = enter(context_,
                                  {.num_steps = static_cast<uint32_t>(num_steps_),
                                   .lane_bytes = static_cast<uint32_t>(lane_bytes_)});
    copy_registered();
    if (entered.num_steps == 0) copy_own(0, own_bytes());
    for (size_t step = 1; step <= entered.num_steps; ++step) {
      copy_in(step);
      copy_own((step - 1) * lane_bytes_, step < entered.num_steps ? lane_bytes_ : own_bytes());
      copy_out(step - 1);
      if (step < entered.num_steps) context_.barrier();
    }
    if (entered.any_registered) context_.barrier();
    segment_.next_step += entered.num_steps;
  }

 private:
  bool shares_lane() const {
    return operation_.collective != DPT_SCATTER && operation_.collective != DPT_ALL_TO_ALL;
  }
  bool sends(int rank) const {
    const bool from_root =
        operation_.collective == DPT_BROADCAST || operation_.collective == DPT_SCATTER;
    return !from_root || rank == operation_.root;
  }
  bool receives(int rank) const {
    return operation_.collective != DPT_GATHER || rank == operation_.root;
  }
  // The source's input that goes to `receiver`, and the receiver's output that is from `source`.
  int input_index(int receiver) const { return shares_lane() ? 0 : receiver; }
  char* output_from(int source) const {
    const bool one = operation_.collective == DPT_BROADCAST || operation_.collective == DPT_SCATTER;
    return static_cast<char*>(operation_.outputs[one ? 0 : source]);
  }
  size_t bytes_from(int source) const {
    return segment_.inputs(source, context_.header_parity())[input_index(context_.me())].bytes;
  }
  char* lane(int source, int receiver, size_t step, size_t lane_bytes) const {
    const int index = shares_lane() ? 0 : receiver < source ? receiver : receiver - 1;
    return segment_.slot(source, (segment_.next_step + step) & 1) + index * lane_bytes;
  }

  void copy_in(size_t step) const {
    for (int index = 0; index < num_inputs_; ++index) {
      const size_t begin = step * lane_bytes_;
      const size_t bytes = operation_.input_bytes(index);
      if (!staged_[index] || begin >= bytes) continue;
      copy(lane(context_.me(), index, step, lane_bytes_),
           static_cast<const char*>(operation_.inputs[index]) + begin,
           std::min(lane_bytes_, bytes - begin));
    }
  }

  void copy_out(size_t step) const {
    if (!receives(context_.me())) return;
    for (int distance = 1; distance < context_.size(); ++distance) {
      // Each starts with its neighbour, so that not all read one slot at a time.
      const int source = (context_.me() + distance) % context_.size();
      if (!sends(source) || context_.reach_input(source, input_index(context_.me()))) continue;
      const size_t lane_bytes = segment_.header(source, context_.header_parity()).lane_bytes;
      const size_t begin = step * lane_bytes;
      const size_t bytes = bytes_from(source);
      if (begin >= bytes) continue;
      copy(output_from(source) + begin,
           lane(source, context_.me(), step, lane_bytes),
           std::min(lane_bytes, bytes - begin));
    }
  }

  void copy_registered() const {
    if (!receives(context_.me())) return;
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int source = (context_.me() + distance) % context_.size();
      if (!sends(source)) continue;
      const char* input = context_.reach_input(source, input_index(context_.me()));
      if (input == nullptr) continue;
      const size_t bytes = bytes_from(source);
      for (size_t begin = 0; begin < bytes; begin += kCopiedBytes) {
        segment_.throw_if_aborted();
        copy(output_from(source) + begin, input + begin, std::min(kCopiedBytes, bytes - begin));
      }
    }
  }

  size_t own_bytes() const {
    const bool both = sends(context_.me()) && receives(context_.me());
    return both ? operation_.input_bytes(input_index(context_.me())) : 0;
  }

  // Copies what a rank sends to itself, in pieces while they are in the cache; up to the end if
  // `bytes` says so.
  void copy_own(size_t begin, size_t bytes) const {
    const size_t all = own_bytes();
    if (begin >= all) return;
    const auto* input =
        static_cast<const char*>(operation_.inputs[input_index(context_.me())]) + begin;
    char* output = output_from(context_.me()) + begin;
    if (input != output) copy(output, input, std::min(bytes, all - begin));
  }

  const RunContext& context_;
  Segment& segment_ = context_.segment;
  const Operation& operation_ = context_.operation;
  int num_inputs_ = 0;
  size_t lane_bytes_ = 0;
  size_t num_steps_ = 0;
  std::vector<bool> staged_;  // which inputs go through the slot
};

void run_exchange(const RunContext& context) { Exchange(context).run(); }

}  // namespace

const Algorithm kExchangeAllGather{AlgorithmName::kExchange, DPT_ALL_GATHER, run_exchange};
const Algorithm kExchangeBroadcast{AlgorithmName::kExchange, DPT_BROADCAST, run_exchange};
const Algorithm kExchangeGather{AlgorithmName::kExchange, DPT_GATHER, run_exchange};
const Algorithm kExchangeScatter{AlgorithmName::kExchange, DPT_SCATTER, run_exchange};
const Algorithm kExchangeAllToAll{AlgorithmName::kExchange, DPT_ALL_TO_ALL, run_exchange};

}  // namespace dpt
