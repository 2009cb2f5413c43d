// Pipelined all_reduce and reduce: the message moves through cache-sized slots in three overlapping
// phases, and past them where a buffer is registered.
//
// The message is cut into chunks. In step t every rank
//   1. copies chunk t into its slot, except its own share of it, which no peer reads
//   2. reduces its share of chunk t-1 from all ranks (its own part straight from the input) into
//      the common result and its output
//   3. copies the other ranks' shares of chunk t-2 from the result to its output
// with one barrier a step. Each rank reads and writes about 3n bytes, mostly from cache.
//
// A rank with a registered input skips 1 and its peers read the input itself; with a registered
// output it skips 3 and they write there. If that is so on all ranks the message is one chunk: two
// barriers, no copies. In a reduce only the root has an output.
#include <vector>

#include "algorithms/algorithm.hpp"
#include "host/copy.hpp"

namespace dpt {
namespace {

// Longest stretch of work between two looks at the abort word: when the group fails, peers stop
// writing to this rank's memory soon.
constexpr size_t kStretchBytes = 1 << 20;

class Pipeline {
 public:
  explicit Pipeline(const RunContext& context)
      : context_(context),
        chunks_(split_chunks(operation_.count, element_bytes_, context.plan.chunk_bytes)) {}

  void run() {
    const bool private_input = segment_.offset_of(input_, operation_.bytes()) == std::nullopt;
    if (private_input) copy_in(0);
    const Entered entered = enter(context_, {});
    look_around();
    if (!needs_slots_) chunks_ = {1, operation_.count};
    const size_t num_chunks = chunks_.num_chunks;
    for (size_t step = 1; step < num_chunks + 2; ++step) {
      if (private_input && step < num_chunks) copy_in(step);
      if (step <= num_chunks) reduce_share(step - 1);
      if (copies_out_ && step >= 2) copy_out(step - 2);
      // The last is for what peers reach directly, and for who copies out.
      if (step < num_chunks || (step == num_chunks && (needs_result_ || entered.any_registered))) {
        context_.barrier();
      }
    }
    segment_.next_step += num_chunks;
  }

 private:
  bool receives(int rank) const {
    return operation_.collective == DPT_ALL_REDUCE || rank == operation_.root;
  }

  // After entering: who reads and writes where.
  void look_around() {
    for (int rank = 0; rank < context_.size(); ++rank) {
      const char* registered_input = context_.reach_input(rank, 0);
      char* registered_output = receives(rank) ? context_.reach_output(rank, 0) : nullptr;
      const bool reads_result = receives(rank) && registered_output == nullptr;
      needs_slots_ |= registered_input == nullptr || reads_result;
      needs_result_ |= reads_result;
      if (rank == context_.me()) {
        copies_out_ = reads_result;
        registered_input = input_;
        registered_output = receives(rank) ? output_ : nullptr;
      }
      inputs_.push_back(registered_input);
      if (registered_output != nullptr) outputs_.push_back(registered_output);
    }
  }

  int parity(size_t chunk) const { return (segment_.next_step + chunk) & 1; }
  size_t begin(size_t chunk) const { return chunk * chunks_.elements; }
  size_t length(size_t chunk) const {
    return std::min(chunks_.elements, operation_.count - begin(chunk));
  }
  Share my_share(size_t chunk) const {
    return share_of(length(chunk), element_bytes_, context_.me(), context_.size());
  }

  // Copies all of a chunk but this rank's share.
  void copy_around_share(char* to, const char* from, size_t chunk) const {
    const Share share = my_share(chunk);
    const size_t after = share.end * element_bytes_;
    copy(to, from, share.begin * element_bytes_);
    copy(to + after, from + after, (length(chunk) - share.end) * element_bytes_);
  }

  void copy_in(size_t chunk) const {
    copy_around_share(
        segment_.slot(context_.me(), parity(chunk)), input_ + begin(chunk) * element_bytes_, chunk);
  }

  void reduce_share(size_t chunk) {
    const Share share = my_share(chunk);
    const size_t stretch = kStretchBytes / element_bytes_;
    for (size_t at = share.begin; at < share.end; at += stretch) {
      if (at != share.begin) segment_.throw_if_aborted();
      const size_t in_chunk = at * element_bytes_;
      const size_t in_message = begin(chunk) * element_bytes_ + in_chunk;
      sources_.clear();
      for (int rank = 0; rank < context_.size(); ++rank) {
        sources_.push_back(inputs_[rank] != nullptr
                               ? inputs_[rank] + in_message
                               : segment_.slot(rank, parity(chunk)) + in_chunk);
      }
      destinations_.clear();
      for (char* output : outputs_) destinations_.push_back(output + in_message);
      if (needs_result_) destinations_.push_back(segment_.result(parity(chunk)) + in_chunk);
      reduce_ranks(context_, sources_.data(), std::min(stretch, share.end - at), destinations_);
    }
  }

  void copy_out(size_t chunk) const {
    copy_around_share(
        output_ + begin(chunk) * element_bytes_, segment_.result(parity(chunk)), chunk);
  }

  const RunContext& context_;
  Segment& segment_ = context_.segment;
  const Operation& operation_ = context_.operation;
  const size_t element_bytes_ = size_of(operation_.dtype);
  const char* const input_ = static_cast<const char*>(operation_.inputs[0]);
  char* const output_ = static_cast<char*>(operation_.outputs[0]);
  Chunks chunks_;
  bool needs_slots_ = false;         // any rank reads or writes through them
  bool needs_result_ = false;        // any rank copies out of it
  bool copies_out_ = false;          // this rank does
  std::vector<const char*> inputs_;  // by rank; nullptr: in the rank's slot
  std::vector<char*> outputs_;       // those written directly
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
};

void run_pipeline(const RunContext& context) { Pipeline(context).run(); }

}  // namespace

const Algorithm kPipelinedAllReduce{AlgorithmName::kPipelined, DPT_ALL_REDUCE, run_pipeline};
const Algorithm kPipelinedReduce{AlgorithmName::kPipelined, DPT_REDUCE, run_pipeline};

}  // namespace dpt
