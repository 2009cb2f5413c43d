// The steps that algorithms share: entering, reducing in rank order, cutting into chunks.
#include <algorithm>
#include <array>
#include <chrono>
#include <sstream>
#include <vector>

#include "algorithms/algorithm.hpp"
#include "base/error.hpp"
#include "host/copy.hpp"
#include "host/reduce.hpp"

namespace dpt {
namespace {

bool is_rooted(Collective collective) {
  return collective == DPT_BROADCAST || collective == DPT_REDUCE || collective == DPT_GATHER ||
         collective == DPT_SCATTER;
}

}  // namespace

OpHeader header_of(const Operation& operation) {
  OpHeader header{};
  header.sequence = operation.sequence;
  header.count = operation.count;
  header.premul_factor = operation.premul_factor;
  header.collective = operation.collective;
  header.dtype = operation.dtype;
  header.reduce_op = operation.reduce_op;
  header.root = is_rooted(operation.collective) ? operation.root : 0;
  header.uneven = operation.is_uneven();
  return header;
}

bool same_operation(const OpHeader& a, const OpHeader& b) {
  // Each rank may bring its own premul_factor, and parts of its own size where they are uneven.
  return a.sequence == b.sequence && a.collective == b.collective && a.dtype == b.dtype &&
         a.reduce_op == b.reduce_op && a.root == b.root &&
         (a.count == b.count || a.uneven || b.uneven);
}

namespace {

std::string describe(const OpHeader& header) {
  std::ostringstream out;
  out << name_of(static_cast<Collective>(header.collective)) << " #" << header.sequence;
  if (header.collective == DPT_BARRIER) return out.str();
  out << " (" << header.count << " x " << name_of(static_cast<DataType>(header.dtype));
  if (header.reduce_op != DPT_NO_REDUCE) {
    out << ", " << name_of(static_cast<ReduceOp>(header.reduce_op));
  }
  if (is_rooted(static_cast<Collective>(header.collective))) out << ", root " << header.root;
  if (header.uneven) out << ", uneven parts";
  out << ")";
  return out.str();
}

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Writes what peers need to know of this rank's buffers; whether they reach any of them directly.
bool publish_buffers(const RunContext& context) {
  const Operation& operation = context.operation;
  Segment& segment = context.segment;
  const bool is_root = context.me() == operation.root;
  bool registered = false;
  auto offset = [&](const void* buffer, size_t bytes) {
    const auto found = segment.offset_of(buffer, bytes);
    registered |= found.has_value();
    return found.value_or(BufferInfo::kPrivate);
  };
  BufferInfo* info = segment.inputs(context.me(), context.header_parity());
  for (int i = 0; i < num_inputs(operation.collective, is_root, context.size()); ++i) {
    info[i] = {operation.input_bytes(i), offset(operation.inputs[i], operation.input_bytes(i))};
  }
  info = segment.outputs(context.me(), context.header_parity());
  // Elsewhere receivers copy for themselves, so where their outputs lie is their own affair.
  const bool reached =
      operation.collective == DPT_ALL_REDUCE || (operation.collective == DPT_REDUCE && is_root);
  for (int i = 0; i < num_outputs(operation.collective, is_root, context.size()); ++i) {
    const size_t bytes = operation.output_bytes(i);
    info[i] = {bytes, reached ? offset(operation.outputs[i], bytes) : BufferInfo::kPrivate};
  }
  return registered;
}

void check_same_operation(const RunContext& context) {
  Segment& segment = context.segment;
  const OpHeader& mine = segment.header(context.me(), context.header_parity());
  for (int peer = 0; peer < context.size(); ++peer) {
    const OpHeader& theirs = segment.header(peer, context.header_parity());
    if (same_operation(mine, theirs)) continue;
    throw_mismatch(
        context, {segment.global_rank(context.me()), mine}, {segment.global_rank(peer), theirs});
  }
}

// Every block must be as long for its receiver as for its sender. All ranks check all pairs, so
// that all of them fail or none.
void check_parts(const RunContext& context) {
  const Segment& segment = context.segment;
  const int parity = context.header_parity();
  const bool shared = context.operation.collective == DPT_ALL_GATHER;
  for (int from = 0; from < context.size(); ++from) {
    for (int to = 0; to < context.size(); ++to) {
      const uint64_t sent = segment.inputs(from, parity)[shared ? 0 : to].bytes;
      const uint64_t expected = segment.outputs(to, parity)[from].bytes;
      if (sent == expected) continue;
      throw Error(DPT_ERR_MISMATCH,
                  context.wait.describe() + ": rank " + std::to_string(segment.global_rank(from)) +
                      " sends " + std::to_string(sent) + " bytes to rank " +
                      std::to_string(segment.global_rank(to)) + ", which expects " +
                      std::to_string(expected) +
                      ". The sizes of the parts must agree between sender and receiver");
    }
  }
}

}  // namespace

void throw_mismatch(const RunContext& context, EnteredBy one, EnteredBy other) {
  throw Error(DPT_ERR_MISMATCH,
              context.wait.describe() + ": ranks entered different operations: rank " +
                  std::to_string(one.global_rank) + " " + describe(one.header) + ", rank " +
                  std::to_string(other.global_rank) + " " + describe(other.header) +
                  ". Every rank must call the same collective with the same size and dtype");
}

std::string Operation::describe() const { return dpt::describe(header_of(*this)); }

int num_inputs(Collective collective, bool is_root, int size) {
  switch (collective) {
    case DPT_BARRIER:
    case DPT_RECV:
      return 0;
    case DPT_REDUCE_SCATTER:
    case DPT_ALL_TO_ALL:
      return size;
    case DPT_SCATTER:
      return is_root ? size : 0;
    default:
      return 1;
  }
}

int num_outputs(Collective collective, bool is_root, int size) {
  switch (collective) {
    case DPT_BARRIER:
    case DPT_SEND:
      return 0;
    case DPT_ALL_GATHER:
    case DPT_ALL_TO_ALL:
      return size;
    case DPT_GATHER:
      return is_root ? size : 0;
    default:
      return 1;
  }
}

OpHeader& publish_header(const RunContext& context) {
  OpHeader& mine = context.segment.header(context.me(), context.header_parity());
  mine = header_of(context.operation);
  mine.arrived_ns = steady_ns();
  return mine;
}

void note_arrivals(const RunContext& context) {
  if (context.arrivals == nullptr) return;
  int last = 0;
  int64_t latest = 0;
  int64_t before = 0;  // of the last but one
  for (int rank = 0; rank < context.size(); ++rank) {
    const int64_t arrived = context.segment.header(rank, context.header_parity()).arrived_ns;
    before = std::max(before, std::min(arrived, latest));
    if (arrived > latest) {
      latest = arrived;
      last = rank;
    }
  }
  const int64_t mine = context.segment.header(context.me(), context.header_parity()).arrived_ns;
  // Other nodes' clocks are their own: how late they were shows when they have come.
  const int64_t complete = context.nodes != nullptr ? steady_ns() : latest;
  const bool alone = context.size() == 1;
  context.arrivals->add(last,
                        alone ? 0 : static_cast<uint64_t>(latest - before),
                        static_cast<uint64_t>(complete - mine));
}

Entered enter(const RunContext& context, const Staging& staging) {
  Segment& segment = context.segment;
  OpHeader& mine = publish_header(context);
  mine.num_steps = staging.num_steps;
  mine.lane_bytes = staging.lane_bytes;
  mine.registered = publish_buffers(context);
  context.barrier();
  note_arrivals(context);
  check_same_operation(context);
  Entered entered;
  bool uneven = false;
  for (int rank = 0; rank < context.size(); ++rank) {
    const OpHeader& header = segment.header(rank, context.header_parity());
    entered.num_steps = std::max(entered.num_steps, header.num_steps);
    entered.any_registered |= header.registered != 0;
    uneven |= header.uneven != 0;
  }
  if (uneven) check_parts(context);
  return entered;
}

void enter_small(const RunContext& context) {
  publish_header(context);
  context.barrier();
  note_arrivals(context);
  check_same_operation(context);
}

void reduce_ranks(const RunContext& context,
                  const void* const* sources,
                  size_t count,
                  const std::vector<void*>& destinations) {
  const Operation& operation = context.operation;
  Segment& segment = context.segment;
  std::array<double, 256> factors;
  if (operation.reduce_op == DPT_PREMUL_SUM) {
    for (int rank = 0; rank < segment.size(); ++rank) {
      factors[rank] = segment.header(rank, operation.sequence & 1).premul_factor;
    }
  }
  reduce({.dtype = operation.dtype,
          .op = operation.reduce_op,
          .sources = sources,
          .num_sources = segment.size(),
          .factors = factors.data(),
          .count = count,
          .destination = destinations[0],
          .copies = destinations.data() + 1,
          .num_copies = static_cast<int>(destinations.size()) - 1});
}

void run_local(const Operation& operation) {
  if (operation.collective == DPT_BARRIER) return;
  if (operation.reduce_op != DPT_NO_REDUCE) {
    if (operation.count == 0) return;
    reduce({.dtype = operation.dtype,
            .op = operation.reduce_op,
            .sources = operation.inputs,
            .num_sources = 1,
            .factors = &operation.premul_factor,
            .count = operation.count,
            .destination = operation.outputs[0]});
  } else if (operation.inputs[0] != operation.outputs[0]) {
    if (operation.input_bytes(0) != operation.output_bytes(0)) {
      throw Error(DPT_ERR_MISMATCH,
                  operation.describe() + ": the input has " +
                      std::to_string(operation.input_bytes(0)) + " bytes, the output " +
                      std::to_string(operation.output_bytes(0)));
    }
    copy(operation.outputs[0], operation.inputs[0], operation.input_bytes(0));
  }
}

size_t lane_bytes_of(size_t chunk_bytes, int num_lanes) {
  return std::max(kCacheLine, chunk_bytes / num_lanes / kCacheLine * kCacheLine);
}

Share share_of(size_t count, size_t element_bytes, int rank, int size) {
  const size_t per_rank = round_up((count + size - 1) / size, kCacheLine / element_bytes);
  const size_t begin = std::min(count, per_rank * rank);
  return {begin, std::min(count, begin + per_rank)};
}

Chunks split_chunks(size_t count, size_t element_bytes, size_t chunk_bytes) {
  const size_t most = chunk_bytes / element_bytes;
  const size_t num_chunks = std::max<size_t>(1, (count + most - 1) / most);
  const size_t even = round_up((count + num_chunks - 1) / num_chunks, kCacheLine / element_bytes);
  const size_t elements = std::clamp<size_t>(even, 1, most);
  return {std::max<size_t>(1, (count + elements - 1) / elements), elements};
}

}  // namespace dpt
